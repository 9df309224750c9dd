// A whole block: how many of its heads and neurons are found, and the neurons as heat maps.
import { byId, element, plural } from "./format.js";
import { foot } from "./chart.js";
import { bar, figure, paint, palette } from "./heads.js";

const words = { up: "into the neurons", gate: "into their gates", down: "out of the neurons" };
let built = ""; // whose cards are on the page

export function drawFound(told, moment) {
  byId("found").hidden = told.neurons === null;
  if (told.neurons === null) return;
  const { frame } = told.picture(moment), whole = { heads: told.truth.length, neurons: told.neurons[0].columns };
  byId("found-bars").replaceChildren(...Object.entries(whole).map(([what, all]) => {
    const found = frame?.found[what] ?? 0, has = frame ? `; the student has ${frame.sizes[what]}` : "";
    const drawn = element("i", { class: found === all ? "tiny" : "" });
    drawn.style.width = `${(100 * found) / all}%`;
    const said = `${found} of ${plural(all, what.slice(0, -1))}`;
    return element("div", { "data-found": what }, element("b", {}, said), has, element("div", { class: "track", role: "img", "aria-label": `${said} found` }, drawn));
  }));
}

export function drawNeurons(told, moment, smooth) {
  const { frame, next, share } = told.picture(moment), box = byId("neuron-cards");
  byId("neurons-box").hidden = told.neurons === null;
  if (told.neurons === null) {
    box.replaceChildren();
    built = "";
    return;
  }
  const kind = `${told.run.id},${Boolean(frame)}`;
  if (kind !== built) box.replaceChildren(...told.neurons.map((matrix) => card(matrix, Boolean(frame))));
  built = kind;
  const colours = palette();
  told.neurons.forEach((matrix, i) => {
    const learned = frame?.neurons[i];
    if (learned) paint(box.children[i].querySelector("[data-learned]"), learned, next?.neurons[i], smooth ? share : 0, colours);
    paint(box.children[i].querySelector("[data-truth]"), matrix, null, 0, colours);
  });
  const errors = Object.values(frame?.neuron_errors ?? {});
  byId("neuron-error").dataset.symbol = "the neurons";
  bar(byId("neuron-error"), errors.length ? Math.max(...errors) : null, foot(told));
}

function card(matrix, learned) {
  const name = words[matrix.name], made = element("div", {});
  const figures = [figure(`${matrix.name}, learned`, `Weights ${name}, learned`, learned && { "data-learned": matrix.name }), figure(`${matrix.name}, truth`, `Weights ${name}, truth`, { "data-truth": matrix.name })];
  for (const one of figures) one.lastElementChild.style.aspectRatio = `${matrix.columns} / ${matrix.rows}`;
  made.append(...figures);
  return made;
}
