// What a box was asked: calls spent, what for, and the heads that their answers show.
import { byId, element, plural } from "./format.js";

export function drawAsked(told, moment) {
  const asked = told.asked(moment);
  byId("asked").hidden = !asked;
  if (!asked) return;
  const heads = asked.heads === null ? "No heads found yet." : `${plural(asked.heads, "head")} found.`;
  byId("asked-calls").textContent = `${asked.calls} of at most ${plural(asked.most, "call")}, ${plural(asked.scalars, "number")} back.`;
  byId("asked-heads").textContent = heads;
  const bar = byId("asked-bar");
  bar.firstElementChild.style.width = `${Math.min(100, (100 * asked.calls) / asked.most)}%`;
  bar.setAttribute("aria-label", `${asked.calls} of ${asked.most} calls are spent`);
  byId("asked-steps").replaceChildren(...asked.steps.map(([purpose, calls]) => element("tr", {}, element("th", { scope: "row" }, purpose), element("td", { class: "n" }, String(calls)))));
}
