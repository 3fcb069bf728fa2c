/* The errors along a graph: a point for each value and series, on a logarithmic scale. */

const SERIES = [
  {key: "error", title: "error", colour: "--series-1", help: "of a value against PyTorch, on the numbers that the run computed it from"},
  {key: "eager", title: "eager", colour: "--series-2", help: "eager's error against float64 on the same numbers, where float64 was needed"},
];
const SCALES = {
  share: "as a multiple of the tolerance", relative: "relative to the largest magnitude", absolute: "absolute",
};
const MARGIN = {left: 62, right: 14, top: 20, bottom: 34};
const ALL = Infinity; // drawn at the top: NaN or infinity on one side only

class Plot {
  /* rows: the compared ones, in execution order; distance(row, key); name(row); onpick(row). */
  constructor({rows, distance, name, culprit, onpick}) {
    Object.assign(this, {rows, distance, name, culprit, onpick});
    this.at = -1;
    this.hidden = new Set();
    this.scale = "share";
    this.canvas = element("canvas", {});
    this.tip = element("div", {class: "tip", hidden: true});
    this.area = element(
      "div", {class: "area", role: "slider", tabindex: 0, "aria-label": "Error along the graph, in execution order", "aria-valuemin": 1,
        "aria-valuemax": rows.length, "aria-valuenow": 1}, this.canvas, this.tip);
    const boxes = SERIES.filter((series) => rows.some((row) => distance(row, series.key))).map((series) => this.box(series));
    this.ofEager = boxes[1]; // sums and the like have no part in eager's share, which is therefore not drawn
    const scale = element("select", {"aria-label": "Scale of the errors", onchange: (event) => { this.scale = event.target.value; this.draw(); }},
      Object.entries(SCALES).map(([value, text]) => element("option", {value}, text)));
    this.element = element("figure", {class: "plot"},
      element("figcaption", {}, element("span", {title: "without views, which compute nothing"}, "Largest error,"), scale, boxes), this.area);
    this.area.addEventListener("mousemove", (event) => this.hover(event));
    this.area.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.area.addEventListener("click", (event) => { this.hover(event); this.pick(); });
    this.area.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.area);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  box(series) {
    const input = element("input", {type: "checkbox", checked: true, onchange: () => {
      if (input.checked) this.hidden.delete(series.key);
      else this.hidden.add(series.key);
      this.draw();
    }});
    return element("label", {title: series.help}, input, element("i", {class: `swatch ${series.key}`}), series.title);
  }

  error(row, key) {
    const found = this.distance(row, key);
    if (!found || (key === "eager" && this.scale === "share")) return null;
    if (found.nonfinite || found.max_abs === null) return ALL;
    if (this.scale === "share") return found.share === null ? ALL : found.share;
    return this.scale === "relative" && found.scale ? found.max_abs / found.scale : found.max_abs;
  }

  /* The drawn decades: those of the errors, at least four. */
  decades(points) {
    let low = Infinity, high = -Infinity;
    for (const {values} of points) {
      for (const value of values) {
        if (value > 0 && value !== ALL) { low = Math.min(low, value); high = Math.max(high, value); }
      }
    }
    if (this.scale === "share") { low = Math.min(low, 1); high = Math.max(high, 1); }
    if (low > high) return [-16, 0];
    const top = Math.ceil(Math.log10(high) + 0.1);
    return [Math.min(Math.max(Math.floor(Math.log10(low)), top - 20), top - 4), top];
  }

  draw() {
    if (this.ofEager) this.ofEager.hidden = this.scale === "share";
    const width = this.area.clientWidth, height = this.area.clientHeight;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(this.element);
    const colour = (name) => style.getPropertyValue(name).trim();
    const points = SERIES.filter((series) => !this.hidden.has(series.key)).map((series) => (
      {series, values: this.rows.map((row) => this.error(row, series.key))}));
    const [low, high] = this.decades(points);
    const bottom = height - MARGIN.bottom, inside = bottom - MARGIN.top;
    const y = (value) => value === ALL ? 9 : value === 0 ? bottom + 12
      : Math.min(bottom, Math.max(MARGIN.top, bottom - inside * (Math.log10(value) - low) / (high - low)));
    this.x = (i) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (this.rows.length > 1 ? i / (this.rows.length - 1) : 0.5);
    this.axes(pen, colour, {width, height, bottom, low, high, y});
    if (this.scale === "share") this.limit(pen, Math.round(y(1)) + 0.5, colour("--bad"), width);
    for (const {series, values} of points.reverse()) this.line(pen, colour(series.colour), values, y); // the error on top
    this.vertical(pen, this.culprit, colour("--bad"), bottom);
    this.vertical(pen, this.at, colour("--fg"), bottom);
  }

  axes(pen, colour, {width, height, bottom, low, high, y}) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("--muted");
    pen.strokeStyle = colour("--border");
    pen.textAlign = "right";
    const step = Math.ceil((high - low) / Math.max(2, Math.floor((bottom - MARGIN.top) / 22)));
    for (let decade = high; decade >= low; decade -= step) {
      const at = Math.round(y(10 ** decade)) + 0.5;
      pen.beginPath(); pen.moveTo(MARGIN.left - 6, at); pen.lineTo(width - MARGIN.right, at); pen.stroke();
      pen.fillText(`1e${decade}`, MARGIN.left - 10, at + 4);
    }
    pen.fillText("0", MARGIN.left - 10, bottom + 16);
    pen.fillText("NaN/Inf", MARGIN.left - 10, 13);
    pen.textAlign = "center";
    const every = Math.max(1, Math.ceil(this.rows.length / Math.max(1, Math.floor((width - MARGIN.left) / 90))));
    for (let i = 0; i < this.rows.length; i += every) pen.fillText(count(i + 1), this.x(i), height - 3);
  }

  /* The tolerance: above it a value is wrong. */
  limit(pen, at, colour, width) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(MARGIN.left - 6, at); pen.lineTo(width - MARGIN.right, at); pen.stroke();
  }

  line(pen, colour, values, y) {
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1;
    pen.globalAlpha = 0.45;
    pen.beginPath();
    let drawn = false;
    values.forEach((value, i) => {
      if (value === null) { drawn = false; return; }
      if (drawn) pen.lineTo(this.x(i), y(value));
      else pen.moveTo(this.x(i), y(value));
      drawn = true;
    });
    pen.stroke();
    pen.globalAlpha = 1;
    const size = values.length > 1500 ? 2 : values.length > 300 ? 3 : 4;
    values.forEach((value, i) => {
      if (value === null) return;
      const x = this.x(i), at = y(value);
      pen.fillRect(x - size / 2, at - size / 2, size, size);
    });
  }

  vertical(pen, i, colour, bottom) {
    if (i < 0) return;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.setLineDash([4, 3]);
    pen.beginPath(); pen.moveTo(this.x(i), 4); pen.lineTo(this.x(i), bottom + 14); pen.stroke();
    pen.setLineDash([]);
  }

  hover(event) {
    const box = this.area.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    this.show(Math.round(Math.min(1, Math.max(0, share)) * (this.rows.length - 1)));
  }

  /* Moves the cursor to the i-th value and announces it. */
  show(i, quiet = false) {
    if (i < 0 || i >= this.rows.length) return;
    this.at = i;
    const row = this.rows[i];
    const said = SERIES.map((series) => [series.title, this.error(row, series.key)]).filter(([, value]) => value !== null)
      .map(([name, value]) => `${name} ${value === ALL ? "NaN/Inf" : number(value)}`);
    this.area.setAttribute("aria-valuenow", i + 1);
    this.area.setAttribute("aria-valuetext", `${this.name(row)}: ${said.join(", ")}`);
    this.draw();
    this.tip.hidden = quiet;
    if (quiet) return;
    this.tip.replaceChildren(element("strong", {}, this.name(row)), ...said.map((text) => element("div", {}, text)));
    const left = this.x(i), room = this.area.clientWidth;
    this.tip.style.left = left > room / 2 ? "" : `${left + 10}px`;
    this.tip.style.right = left > room / 2 ? `${room - left + 10}px` : "";
  }

  pick() {
    if (this.at >= 0) this.onpick(this.rows[this.at]);
  }

  key(event) {
    const far = Math.max(1, Math.round(this.rows.length / 20));
    const to = {
      ArrowRight: this.at + 1, ArrowUp: this.at + 1, ArrowLeft: this.at - 1, ArrowDown: this.at - 1, PageUp: this.at + far,
      PageDown: this.at - far, Home: 0, End: this.rows.length - 1,
    }[event.key];
    if (to !== undefined) this.show(Math.min(this.rows.length - 1, Math.max(0, to)));
    else if (event.key === "Enter" || event.key === " ") this.pick();
    else if (event.key === "Escape") this.tip.hidden = true;
    else return;
    event.preventDefault();
  }
}
