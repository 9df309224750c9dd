// The descent: residual and largest head error by event, on a log axis that ends at the floor.
import { plural, raised, say, svg } from "./format.js";

const smallest = 1e-17; // zero has no place on a log axis

// The power of ten at which the axis ends: the floor's, or that of what fell below it.
export function foot(told) {
  const values = told.events.flatMap((event) => [event.error, event.head_error]).filter((value) => value > 0);
  const lowest = Math.min(told.floor?.value ?? 0.1, ...values);
  return Math.floor(Math.log10(Math.max(lowest, smallest)));
}

export function drawChart(box, told, moment) {
  const width = box.clientWidth, height = box.clientHeight, events = told.events;
  const left = 46, right = width - 12, top = 12, bottom = height - 34;
  const values = events.flatMap((event) => [event.error, event.head_error]).filter((value) => value !== null);
  const ceiling = Math.max(0, Math.ceil(Math.log10(Math.max(smallest, ...values)) - 0.1)), end = Math.min(foot(told), ceiling - 1);
  const x = (i) => left + ((right - left) * i) / Math.max(1, events.length);
  const y = (value) => top + ((bottom - top) * (ceiling - Math.log10(Math.max(value, 10 ** end)))) / (ceiling - end);
  const drawn = svg("svg", { role: "img", viewBox: `0 0 ${width} ${height}`, "aria-label": summary(told, moment) });
  const every = Math.max(1, Math.ceil((ceiling - end) / 5));
  for (let power = ceiling; power >= end; power -= every) {
    const at = y(10 ** power);
    drawn.append(svg("line", { class: "rule", x1: left, x2: right, y1: at, y2: at }), svg("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, power === 0 ? "1" : `10${raised(power)}`));
  }
  events.forEach((event, i) => {
    if (i && event.stage !== events[i - 1].stage && events.length < 400) drawn.append(svg("line", { class: "border", x1: x(i + 0.5), x2: x(i + 0.5), y1: top, y2: bottom }));
  });
  if (told.floor) drawn.append(svg("line", { class: "floor", x1: left, x2: right, y1: y(told.floor.value), y2: y(told.floor.value) }));
  for (const [name, series] of [["error", "s1"], ["head_error", "s2"]]) {
    const places = events.map((event, i) => [x(i + 1), event[name], i < moment]).filter(([, value]) => value !== null);
    const seen = places.filter(([, , shown]) => shown).map(([at, value]) => [at, y(value)]);
    const later = places.slice(Math.max(0, seen.length - 1)).map(([at, value]) => [at, y(value)]);
    if (later.length > 1) drawn.append(svg("polyline", { class: `${series} later`, points: later.map((place) => place.join(",")).join(" ") }));
    if (seen.length) drawn.append(svg("polyline", { class: series, points: seen.map((place) => place.join(",")).join(" ") }));
    if (events.length <= 100) for (const [cx, cy] of seen) drawn.append(svg("circle", { class: series, cx, cy, r: 3 }));
  }
  if (moment < events.length) drawn.append(svg("line", { class: "cursor", x1: x(moment), x2: x(moment), y1: top, y2: bottom }));
  const axis = events.length ? "events, all stages in a row" : told.running ? "the first step is on its way" : "no step was made";
  drawn.append(svg("text", { x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, axis));
  box.replaceChildren(drawn);
}

function summary(told, moment) {
  if (!told.events.length) return "No step yet";
  return `Relative error on a log axis after ${plural(Math.floor(moment), "event")} of ${told.events.length}: residual ${say(told.value("error", moment))}, largest head error ${say(told.value("head_error", moment))}, floor ${say(told.floor?.value)}`;
}
