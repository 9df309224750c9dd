// The page of the studio: the list of runs, the run that is watched, and when things are drawn.
import { byId, clock, described, element, post, say, sentence, tones, word } from "./format.js";
import { drawAsked } from "./asked.js";
import { drawChart } from "./chart.js";
import { drawHeads } from "./heads.js";
import { drawFound, drawNeurons } from "./neurons.js";
import { drawPhases } from "./phases.js";
import { drawStages } from "./stages.js";
import { Told } from "./told.js";
import * as drop from "./drop.js";
import * as form from "./form.js";
import * as replay from "./replay.js";

let about; // what the server allows
let examples = []; // recorded runs, so that the page is never empty
let shown; // the run on the page
let dirty = true;

// The list of runs, newest first, and the recorded ones

async function list() {
  const runs = (await (await fetch("/runs")).json()).map((run) => ({ ...run, id: `run-${run.number}`, title: `Run ${run.number}` }));
  byId("runs").replaceChildren(...[...runs, ...examples].map((run) => {
    const how = element("span", { class: `how ${tones[run.state] ?? "bad"}` }, word(run.state));
    const what = element("span", { class: "what" }, `${run.messages ? "recorded · " : ""}${method(run).split(":")[0]} · ${described(run.wish, run.data)}`);
    const button = element("button", { type: "button", "aria-current": String(run.id === shown?.run.id), "data-id": run.id }, element("span", {}, run.title), how, what);
    button.addEventListener("click", () => watch(run));
    return element("li", {}, button);
  }));
  return runs;
}

const method = (run) => run.wish.block ? "A whole block: surplus, then as few as are needed" : about.methods[run.wish.method] ?? run.wish.method;

async function readExamples() {
  const read = await Promise.all(about.recorded.map(async (address) => (await fetch(address)).json()));
  return read.map((one, i) => ({ ...one, id: `example-${i + 1}`, running: false, report: false, data: null }));
}

// One run

function watch(run) {
  shown?.source?.close();
  history.replaceState(null, "", `#${run.id}`);
  byId("run").hidden = false;
  shown = { run, told: new Told(run), began: performance.now() - 1000 * run.seconds, took: run.running ? null : run.seconds };
  replay.follow(shown.told);
  form.fill(run.wish, run.data);
  byId("run-heading").textContent = `${run.title} · ${method(run)}`;
  byId("report").href = `/runs/${run.number}/report`;
  if (run.messages) run.messages.forEach((message) => shown.told.hear(message));
  else listen(shown);
  show(run);
  for (const button of byId("runs").querySelectorAll("button")) button.setAttribute("aria-current", String(button.dataset.id === run.id));
}

function listen(mine) {
  mine.source = new EventSource(`/runs/${mine.run.number}/events`);
  const hear = (act) => (message) => { if (mine === shown) act(message); };
  mine.source.onmessage = hear((message) => { mine.told.hear(JSON.parse(message.data)); dirty = true; });
  mine.source.onerror = hear(() => { if (mine.told.running) mine.told.now = "no answer"; dirty = true; });
  mine.source.addEventListener("over", (message) => {
    mine.source.close();
    hear(() => {
      const run = JSON.parse(message.data);
      mine.began = performance.now() - 1000 * run.seconds;
      mine.took = run.seconds;
      show(run);
      list();
    })();
  });
}

function show(run) {
  const { told } = shown;
  told.running = run.running;
  byId("run").classList.toggle("running", run.running);
  byId("state").textContent = word(run.state);
  document.querySelector(".verdict").className = `card verdict ${tones[run.state] ?? "bad"}`;
  byId("stop").hidden = !run.running;
  byId("stop").disabled = false;
  byId("report").hidden = !run.report;
  byId("no-report").hidden = run.report || run.state !== "stopped";
  byId("no-report").textContent = told.frames.length ? "No report: it was not written in time." : "No report: there was no layer yet.";
  dirty = true;
}

// What the paper's phases came to by themselves: polish is not part of them.
function phasesAlone(told) {
  const net = told.events.findLast((event) => event.phase === 6 && event.detail && event.error !== null);
  const polished = told.events.some((event) => event.stage.includes("polish"));
  return told.ended && net ? `Phases alone: residual ${say(net.error)}${polished ? "; the rest by polish" : ""}.` : "";
}

// Drawing: at most once a frame, however fast the run tells

function frame(now) {
  const moved = replay.advance(now);
  if (shown && (dirty || moved)) {
    dirty = false;
    draw(shown.told, replay.shownMoment());
  }
  requestAnimationFrame(frame);
}

function draw(told, moment) {
  const atEnd = moment >= told.events.length, { run, ratio } = told;
  byId("setting").textContent = described(run.wish, run.data) + (ratio === null ? "" : `: ${say(ratio)} times the counting limit`);
  byId("reason").textContent = [...told.reason].map(sentence).concat(phasesAlone(told)).filter(Boolean).join(" ");
  byId("recorded").hidden = !run.messages;
  byId("now").textContent = !atEnd ? told.events[Math.floor(moment) - 1]?.stage ?? "before the first event" : told.running ? told.now : "ended";
  byId("residual-now").textContent = say(told.value("error", moment));
  const picture = told.picture(moment).frame, errors = (picture?.heads ?? []).flatMap((head) => [head.theta_error, head.w_error]);
  byId("worst-name").textContent = told.neurons ? "Largest error, heads and neurons" : "Largest head error";
  byId("run").classList.toggle("whole-block", told.neurons !== null);
  byId("worst").textContent = say(told.neurons ? picture?.worst : errors.length === 0 || errors.includes(null) ? null : Math.max(...errors));
  byId("worst-box").hidden = run.data !== null;
  byId("head-error-key").hidden = run.data !== null;
  byId("floor-key").hidden = told.floor === null;
  byId("floor-name").textContent = told.floor ? `${told.floor.name}, ${say(told.floor.value)}: a right layer's residual ends there` : "";
  drawAsked(told, moment);
  drawPhases(told, moment);
  drawChart(byId("chart"), told, moment);
  drawHeads(told, moment, replay.isPlaying());
  drawFound(told, moment);
  drawNeurons(told, moment, replay.isPlaying());
  drawStages(told, moment);
  replay.drawReplay();
  tick();
}

function tick() {
  if (!shown) return;
  const at = replay.shownMoment(), { told } = shown;
  const then = at < told.events.length ? told.events[Math.floor(at) - 1]?.seconds ?? 0 : null;
  byId("clock").textContent = clock(then ?? shown.took ?? (performance.now() - shown.began) / 1000);
}

// Begin

async function begin() {
  about = await (await fetch("/about")).json();
  const redraw = () => { dirty = true; };
  form.begin(about, async (answer) => {
    const runs = await list();
    watch(runs.find((run) => run.number === answer.number));
    if (matchMedia("(max-width: 60rem)").matches) byId("run").scrollIntoView();
  });
  drop.begin(about);
  replay.begin(redraw);
  byId("stop").addEventListener("click", async () => {
    byId("stop").disabled = true;
    await post(`/runs/${shown.run.number}/stop`, {});
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  setInterval(tick, 100);
  setInterval(() => list().catch(() => {}), 3000);
  requestAnimationFrame(frame);
  examples = await readExamples();
  // Where there is one column, the run comes first, and the form when it is asked for.
  if (matchMedia("(max-width: 60rem)").matches) byId("ask-box").open = false;
  const runs = await list(), all = [...runs, ...examples];
  const wanted = all.find((run) => `#${run.id}` === location.hash) ?? runs.find((run) => run.running) ?? all[0];
  if (wanted) watch(wanted);
  form.open();
  // Whoever opens the page sees heads take shape, unless moving pictures are not wanted.
  if (wanted?.messages && !matchMedia("(prefers-reduced-motion: reduce)").matches) replay.play();
}

begin().catch(() => form.complain("The studio does not answer: is it still running?"));
