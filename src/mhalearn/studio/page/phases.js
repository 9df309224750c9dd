// The paper's six phases as cards, which light up with the report's figures as they end.
import { byId, element } from "./format.js";

const words = { waiting: "waiting", active: "at work", lit: "done", broken: "cannot work" };
const last = 6; // a wide card of one figure, which has its numbers beside it
const seen = new WeakMap(); // the card that an element shows

export function drawPhases(told, moment) {
  byId("phases").hidden = told.phases.length === 0;
  const box = byId("phase-cards");
  if (box.childElementCount !== told.phases.length || box.dataset.run !== told.run.id) {
    box.dataset.run = told.run.id;
    box.replaceChildren(...told.phases.map(([title, purpose], i) => blank(i + 1, title, purpose)));
  }
  told.phases.forEach((_, i) => {
    const shown = box.children[i], { card, active, progress } = told.phase(i + 1, moment);
    const state = card?.breakdown ? "broken" : active ? "active" : card ? "lit" : "waiting";
    shown.className = `phase ${state}`;
    shown.querySelector(".phase-state").textContent = progress === null ? words[state] : `${Math.round(100 * progress)} %`;
    if (seen.get(shown) === card) return;
    seen.set(shown, card);
    shown.querySelector(".found").replaceChildren(...(card ? found(card) : []));
  });
}

function blank(number, title, purpose) {
  const head = element("div", { class: "phase-head" }, element("span", { class: "phase-number", "aria-hidden": "true" }, String(number)), element("h3", {}, `${title}`), element("span", { class: "phase-state" }));
  return element("article", { class: "phase waiting", "aria-label": `Phase ${number}: ${title}` }, head, element("p", { class: "muted" }, purpose), element("div", { class: "found" }));
}

// Figures are shown, words folded, and numbers too where figures take the room of the card.
function found(card) {
  const parts = card.figures.map((figure) => {
    const key = figure.key.map(([colour, text]) => element("span", { class: `s${colour}` }, element("i", { class: "dot" }), text));
    return element("figure", {}, drawing(figure.svg), element("p", { class: "key" }, ...key), element("figcaption", {}, figure.caption));
  });
  if (card.breakdown) parts.unshift(element("p", { class: "breakdown" }, card.breakdown));
  const numbers = card.rows.length ? [table(card)] : [], words = element("p", { class: "muted" }, card.words);
  const full = card.figures.length > 0 && card.number !== last;
  if (!full) parts.push(...numbers);
  return [...parts, element("details", {}, element("summary", {}, full ? "Numbers, and what they mean" : "What this means"), ...(full ? numbers : []), words)];
}

function table(card) {
  const head = card.columns.length ? [element("thead", {}, element("tr", {}, element("td"), ...card.columns.map((name) => element("th", { scope: "col", class: "n" }, name))))] : [];
  const rows = card.rows.map(([name, values]) => element("tr", {}, element("th", { scope: "row" }, name), ...values.map((value) => element("td", { class: "n" }, value))));
  return element("table", {}, ...head, element("tbody", {}, ...rows));
}

// The page's policy allows no style in markup; set one by one they are allowed.
function drawing(text) {
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  if (parsed.nodeName !== "svg") return element("p", { class: "muted" }, "This figure could not be drawn.");
  const drawn = document.importNode(parsed, true);
  for (const one of drawn.querySelectorAll("[data-style]")) {
    one.style.cssText = one.dataset.style;
    one.removeAttribute("data-style");
  }
  return drawn;
}
