// The heads as heat maps: learned beside true where there is a truth, at any moment of the run.
import { byId, element, plural, say } from "./format.js";
import { foot } from "./chart.js";

const precise = 1e-10; // a head error below this is shown as found
const matrices = [["Θ", "theta"], ["W", "w"]];
let built = ""; // what kind of cards are on the page

const decoded = new WeakMap();
function bytes(matrix) {
  if (!decoded.has(matrix)) decoded.set(matrix, Int8Array.from(atob(matrix.bytes), (c) => c.charCodeAt(0)));
  return decoded.get(matrix);
}

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/[\da-f]{2}/gi).map((part) => parseInt(part, 16));
  return { zero: rgb("--zero"), less: rgb("--series-1"), more: rgb("--series-2") };
}

// Between two pictures of one size the colours fade from the one to the other.
export function paint(canvas, matrix, next, share, colours) {
  const from = bytes(matrix), to = next && next.rows === matrix.rows && next.columns === matrix.columns ? bytes(next) : from;
  if (canvas.width !== matrix.columns || canvas.height !== matrix.rows) Object.assign(canvas, { width: matrix.columns, height: matrix.rows });
  const context = canvas.getContext("2d"), image = context.createImageData(matrix.columns, matrix.rows);
  for (let i = 0; i < from.length; i++) {
    const value = from[i] + share * (to[i] - from[i]), size = Math.abs(value) / 127, end = value < 0 ? colours.less : colours.more;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colours.zero[c] + size * (end[c] - colours.zero[c]);
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

export function drawHeads(told, moment, smooth) {
  const { frame, next, share } = told.picture(moment), truth = told.truth, heads = frame?.heads ?? [];
  const apart = truth.length > 0 && heads.length > 0 && heads[0].theta_error === null; // another number of heads
  byId("heads-note").textContent = note(told, frame, apart);
  const beside = apart ? 0 : truth.length, count = Math.max(beside, heads.length);
  const kind = [told.run.id, count, heads.length, beside].join();
  const box = byId("head-cards");
  if (kind !== built || box.childElementCount !== count) {
    box.replaceChildren(...Array.from({ length: count }, (_, i) => card(i, i < heads.length, beside > 0)));
    built = kind;
  }
  const colours = palette();
  for (let i = 0; i < count; i++) {
    for (const [, name] of matrices) {
      const at = (role) => box.children[i].querySelector(`[data-${role}="${name}"]`);
      const blend = smooth && next?.heads.length === heads.length ? share : 0;
      if (i < heads.length) paint(at("learned"), heads[i][name], next?.heads[i]?.[name], blend, colours);
      if (beside) paint(at("truth"), truth[i][name], null, 0, colours);
      bar(at("error"), heads[i]?.[`${name}_error`], foot(told));
    }
  }
  const limits = frame?.limits ?? told.limits;
  byId("scale-ends").parentElement.hidden = !limits;
  byId("scale-ends").textContent = limits ? `Θ ±${say(limits[0])}, W ±${say(limits[1])}` : "";
  byId("bar-key").hidden = !beside;
}

function card(i, learned, truth) {
  const pair = element("div", { class: truth ? "pair" : "pair alone" });
  for (const [symbol, name] of matrices) {
    pair.append(figure(`${symbol}, learned`, `Head ${i + 1}, ${symbol}, learned`, learned && { "data-learned": name }));
    if (truth) pair.append(figure(`${symbol}, truth`, `Head ${i + 1}, ${symbol}, truth`, { "data-truth": name }), element("div", { class: "error", "data-error": name, "data-symbol": symbol }));
  }
  return element("article", { class: "head" }, element("h3", {}, `Head ${i + 1}`), pair);
}

export function figure(caption, label, attributes) {
  const drawn = attributes ? element("canvas", { role: "img", "aria-label": `${label}: heat map`, ...attributes }) : element("div", { class: "blank", role: "img", "aria-label": `${label}: not there yet` });
  return element("figure", {}, element("figcaption", {}, caption), drawn);
}

export function bar(box, error, end) {
  if (!box) return;
  box.hidden = error === null || error === undefined;
  if (box.hidden) return;
  if (!box.childElementCount) box.append(element("div", { class: "track", "aria-hidden": "true" }, element("i")), element("span"));
  const drawn = box.querySelector("i"), share = 1 - Math.log10(Math.max(error, 10 ** end)) / end;
  drawn.className = error < precise ? "tiny" : "";
  drawn.style.width = `${100 * Math.min(1, Math.max(0.02, share))}%`;
  box.querySelector("span").textContent = `error of ${box.dataset.symbol} ${say(error)}`;
}

function note(told, frame, apart) {
  const large = told.run.wish.dim > 32 ? " Each cell stands for several entries, the largest of them." : "";
  if (apart) return `The learned layer has ${plural(frame.count, "head")}, the hidden one ${told.truth.length}: they cannot be matched.${large}`;
  if (frame && told.neurons) return `Each true head, and what the student has in its place: now it has ${plural(frame.count, "head")}. The learner does not see the truth.`;
  if (!frame && !told.truth.length) return told.running ? "Heads appear here with the first step." : "No layer was found.";
  if (!frame) return told.running ? "The true heads; the learned ones appear beside them." : "The true heads. No layer was found beside them.";
  if (!told.truth.length) return `The learned heads; there is no truth to compare them with.${frame.count > frame.heads.length ? ` The first ${frame.heads.length} of ${frame.count}.` : ""}${large}`;
  return `Each learned head beside the true one it is matched with. The learner does not see the truth.${large}`;
}
