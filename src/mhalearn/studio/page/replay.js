// The replay: a slider over the events, and a button that goes through them.
import { byId, clock } from "./format.js";

let moment = null; // null: the newest, whatever comes
let playing = null; // when and where it began
let told = null, redraw = () => {};

export const isPlaying = () => playing !== null;
export const shownMoment = () => (told === null ? 0 : moment === null ? told.events.length : Math.min(moment, told.events.length));

export function follow(newTold) {
  told = newTold;
  moment = playing = null;
}

export function play() {
  const from = moment === null || moment >= told.events.length ? 0 : moment;
  playing = { from, began: performance.now() };
  moment = from;
  redraw();
}

export function goTo(number) {
  playing = null;
  moment = number >= told.events.length ? null : number;
  redraw();
}

// Called once a frame: moves on while it plays.
export function advance(now) {
  if (!playing) return false;
  const count = told.events.length, seconds = Math.min(14, Math.max(4, 0.5 * count));
  moment = playing.from + ((now - playing.began) / 1000 / seconds) * count;
  if (moment >= count) moment = playing = null;
  return true;
}

export function drawReplay() {
  const count = told.events.length, at = shownMoment(), event = told.events[Math.floor(at) - 1];
  const slider = byId("moment");
  byId("replay").hidden = count === 0;
  slider.max = count;
  slider.value = Math.floor(at);
  const said = event ? `Event ${Math.floor(at)} of ${count}, ${clock(event.seconds)}: ${event.stage}` : "Before the first event";
  slider.setAttribute("aria-valuetext", said);
  byId("moment-said").textContent = said;
  byId("moment-words").textContent = `· ${event ? told.words[event.stage] ?? "" : "nothing is learned yet"}`;
  byId("play").textContent = playing ? "Pause" : "Play";
}

export function begin(draw) {
  redraw = draw;
  byId("moment").addEventListener("input", () => goTo(Number(byId("moment").value)));
  byId("play").addEventListener("click", () => (playing ? goTo(Math.floor(moment)) : play()));
}
