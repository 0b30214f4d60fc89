/* Shared code of the pages: elements, hover, tables, scales and axes. */
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const palette = dark ? ["#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#4fae4f", "#9085e9", "#e66767"]
                     : ["#2a78d6", "#eb6834", "#1baf7a", "#b98000", "#d6588c", "#008300", "#4a3aa7", "#e34948"];
const colour = index => palette[index % palette.length];

const byId = id => document.getElementById(id);
const percent = value => (100 * value).toFixed(value && value < 0.001 ? 3 : 2) + " %";
const share = (part, whole) => whole ? part / whole : 0;
const short = value => Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
function element(name, attributes, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) key.startsWith("on") ? found[key] = value : found.setAttribute(key, value);
  found.append(...children);
  return found;
}
function drawn(name, attributes, parent, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  if (parent) parent.append(found);
  return found;
}
const tip = byId("tip");
function hover(target, words) {
  target.addEventListener("mousemove", event => {
    const text = words(event);
    tip.style.display = text ? "block" : "none";
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  target.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}

/* Tables: columns are [title, value of a row for sorting, its text]. */
function table(where, columns, rows, options) {
  let by = options.by ?? null, up = false;
  const draw = () => {
    const order = rows.map((_, index) => index);
    if (by !== null) order.sort((a, b) => {
      const [x, y] = [columns[by][1](rows[a]), columns[by][1](rows[b])];
      return (x < y ? -1 : x > y ? 1 : a - b) * (up ? 1 : -1);
    });
    const head = element("tr", {}, ...columns.map(([title], index) => element("th",
      { "aria-sort": index === by ? (up ? "ascending" : "descending") : "none", onclick: () => { up = index === by && !up; by = index; draw(); } }, title)));
    const body = element("tbody", {});
    for (const index of order) {
      const line = element("tr", options.click ? { class: "pick" + (options.on && options.on(rows[index]) ? " on" : "") } : {},
        ...columns.map(([, value, text]) => element("td", {}, text ? text(rows[index]) : String(value(rows[index])))));
      if (options.click) line.onclick = () => options.click(rows[index], line);
      body.append(line);
    }
    byId(where).replaceChildren(element("table", {}, element("thead", {}, head), body));
  };
  draw();
}

/* Axes. A scale is {to: value to [0, 1], ticks: [[value, text]]}. */
const HEIGHT = 300, LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 34;
function linear(low, high, ticks, warp = value => value) {
  const [a, b] = [warp(low), warp(high)];
  return { to: value => (warp(Math.min(Math.max(value, low), high)) - a) / (b - a || 1), ticks: ticks.filter(([value]) => value >= low && value <= high) };
}
function ratioScale(values) {
  let far = 0.05;
  for (const value of values) far = Math.max(far, Math.abs(value));
  const marks = [1e-20, 1e-10, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.8, 0.9, 0.97, 1, 1.03, 1.1, 1.25, 2, 10, 100, 1e3, 1e4, 1e6, 1e10, 1e20];
  const scale = linear(-far * 1.05, far * 1.05, marks.map(mark => [Math.log(mark), mark >= 1e4 || mark < 1e-3 ? mark.toExponential(0) : String(mark)]), value => Math.asinh(value / 0.1));
  const kept = [];
  for (const tick of [...scale.ticks].sort((a, b) => Math.abs(a[0]) - Math.abs(b[0])))
    if (kept.every(other => Math.abs(scale.to(other[0]) - scale.to(tick[0])) > 0.055)) kept.push(tick);
  scale.ticks = kept;
  return scale;
}
function powers(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 7)), found = [];
  for (let power = Math.ceil(low); power <= high; power += step) found.push([power, String(2 ** power)]);
  return found;
}
function chart(place, across, up, titles) {
  // As wide as there is room, so that text has its size on a phone too.
  const width = Math.max(place.clientWidth, 240);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": titles.join(", ") });
  const x = value => LEFT + across.to(value) * (width - LEFT - RIGHT), y = value => HEIGHT - BOTTOM - up.to(value) * (HEIGHT - TOP - BOTTOM);
  for (const [value, text] of up.ticks) {
    drawn("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: text === titles[2] ? "one" : "grid" }, svg);
    drawn("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, svg, text);
  }
  for (const [value, text] of across.ticks) drawn("text", { x: x(value), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, svg, text);
  drawn("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, svg, titles[0]);
  drawn("text", { x: LEFT, y: TOP, "text-anchor": "start", dy: -1 }, svg, titles[1]);
  place.replaceChildren(svg);
  // Where between the axes' ends the mouse is, from 0 to 1.
  const at = event => ((event.clientX - svg.getBoundingClientRect().left) - LEFT) / (width - LEFT - RIGHT);
  return { svg, x, y, at };
}
function band(plot, rows) {
  if (!rows.length) return;
  const line = column => rows.map(row => `${plot.x(row[0]).toFixed(1)},${plot.y(row[column]).toFixed(1)}`);
  drawn("polygon", { points: [...line(3), ...line(1).reverse()].join(" "), fill: "var(--band)" }, plot.svg);
  drawn("polyline", { points: line(2).join(" "), fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 }, plot.svg);
}
/* Draw again whenever the page gets another width. */
function onWidth(draw) {
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
}
