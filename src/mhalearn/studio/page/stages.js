// What happened: the stages of a run in their order, each with a word of explanation.
import { byId, clock, element, say } from "./format.js";
import { goTo } from "./replay.js";

const mostRows = 200;
let drawn = null; // what the table shows

export function drawStages(told, moment) {
  byId("no-stages").hidden = told.events.length > 0;
  byId("stages-box").hidden = told.events.length === 0;
  const stages = told.stages().slice(-mostRows), key = `${told.run.id},${told.events.length},${told.reason.length}`;
  const body = byId("stages");
  if (drawn !== key) {
    drawn = key;
    body.replaceChildren(...stages.map((stage, i) => row(stage, stages[i - 1]?.stage === stage.stage ? "" : told.words[stage.stage], told.reason)));
    if (told.running) byId("stages-box").scrollTop = byId("stages-box").scrollHeight;
  }
  stages.forEach((stage, i) => {
    body.children[i].classList.toggle("now", stage.from <= moment && moment < stage.to + 1 && moment < told.events.length);
    body.children[i].classList.toggle("later", stage.from > moment);
  });
}

// What the verdict at the top says is not said again here.
function row(stage, words, reason) {
  const button = element("button", { type: "button", class: "link", title: "Go to its end in the replay" }, stage.stage);
  button.addEventListener("click", () => goTo(stage.to));
  const name = element("th", { scope: "row" }, button, element("span", {}, words ?? ""));
  if (stage.detail && !reason.includes(stage.detail)) name.append(element("span", { class: stage.broke_down ? "bad" : "detail" }, stage.detail));
  return element("tr", {}, name, element("td", { class: "n" }, String(stage.steps)), element("td", { class: "n" }, say(stage.error)), element("td", { class: "n" }, clock(stage.seconds)));
}
