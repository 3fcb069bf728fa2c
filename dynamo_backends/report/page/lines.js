/* A long text or a diff. Only visible lines are in the document. */

const LINE = 19; // pixels, as in report.css

class Lines {
  /* label: for screen readers; lines: texts; isDiff: whether the first character of a line is +, - or space. */
  constructor(label, lines, isDiff) {
    Object.assign(this, {lines, isDiff});
    const longest = lines.reduce((most, line) => Math.max(most, line.length), 0);
    this.body = element("div", {class: "body"});
    this.body.style.height = `${lines.length * LINE}px`;
    this.body.style.width = `${longest + 8}ch`;
    this.element = element("div", {class: `lines${isDiff ? " diff" : ""}`, tabindex: 0, role: "region", "aria-label": label}, this.body);
    this.element.style.setProperty("--digits", `${String(lines.length).length + 1}ch`);
    this.element.addEventListener("scroll", () => this.later(), {passive: true});
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  later() {
    if (this.waits) return;
    this.waits = requestAnimationFrame(() => { this.waits = 0; this.draw(); });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / LINE) - 20);
    const end = Math.min(this.lines.length, first + Math.ceil(this.element.clientHeight / LINE) + 40);
    if (first === this.first && end === this.end) return;
    [this.first, this.end] = [first, end];
    const made = [];
    for (let i = first; i < end; i++) made.push(this.make(i));
    this.body.replaceChildren(...made);
  }

  make(i) {
    const line = this.lines[i];
    let kind = "";
    if (this.isDiff) kind = {"+": "added", "-": "removed", "@": "group"}[line[0]] || "";
    else if (/^\s*#/.test(line)) kind = "comment";
    const made = element("div", {class: `line ${kind}`}, element("span", {class: "gutter", "aria-hidden": "true"}, this.isDiff ? "" : i + 1),
      element("span", {}, line));
    made.style.transform = `translateY(${i * LINE}px)`;
    return made;
  }

  /* Scrolls to the first line that contains a text. */
  find(text) {
    const i = this.lines.findIndex((line) => line.includes(text));
    if (i >= 0) this.element.scrollTop = Math.max(0, i - 4) * LINE;
    return i >= 0;
  }
}
