/* A table of many rows, with sorting, filtering and keyboard navigation. Only visible rows are in the document. */

const ROW = 26; // pixels, as in report.css
const BEYOND = 12; // rows kept above and below the visible ones
const WRAPPED = 300; // with at most so many rows, all are in the document, and their texts wrap

class Grid {
  /*
   * label: what it is called.
   * columns: {key, title, width, align, help, value: row => number or text to sort by, cell: row => text or node}.
   * rows: any values; a row is one of them.
   * onselect(row), onopen(row): a row became the current one, or was opened (Enter, click).
   * rowClass(row): its classes.
   * fits: the table is as high as its rows, up to the height; if there are not many, long texts are wrapped, not cut.
   */
  constructor({label, columns, rows, onselect, onopen, rowClass, fits, height}) {
    Object.assign(this, {columns, rows, onselect, onopen, rowClass});
    this.wraps = Boolean(fits) && rows.length <= WRAPPED;
    this.shown = rows.slice();
    this.current = -1; // index in shown
    this.sorting = null;
    this.accepts = () => true;
    this.made = new Map(); // index in shown -> element
    this.body = element("div", {class: "body", role: "rowgroup"});
    this.heads = columns.map((column) => this.head(column));
    this.element = element(
      "div", {class: `grid${fits ? " fits" : ""}${this.wraps ? " wraps" : ""}`, role: "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length},
      element("div", {class: "heads", role: "rowgroup"}, element("div", {class: "row", role: "row", "aria-rowindex": 1}, this.heads)),
      this.body,
      this.empty = element("p", {class: "nothing", hidden: true}, "No row matches the filter."),
    );
    this.id = `grid${Grid.made = (Grid.made || 0) + 1}`;
    const template = columns.map((column) => column.width).join(" ");
    this.element.style.setProperty("--columns", template);
    const least = columns.reduce((sum, column) => sum + Number(/\d+/.exec(column.width)[0]), 0);
    this.element.style.setProperty("--least", `${least}px`);
    if (height) this.element.style.maxHeight = height;
    this.element.addEventListener("scroll", () => this.later(), {passive: true});
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.later()).observe(this.element);
    this.refresh();
  }

  head(column) {
    const button = element("button", {type: "button", title: column.help || `Sort by ${column.title}`, tabindex: -1,
      onclick: () => this.sort(column.key)}, column.title || element("span", {class: "unseen"}, column.help));
    return element("div", {role: "columnheader", class: column.align || "", "aria-sort": "none", "data-key": column.key}, button);
  }

  /* Ascending, descending, then the original order. Rows without a value are last. */
  sort(key) {
    const before = this.sorting;
    const first = this.columns.find((column) => column.key === key).align === "right" ? -1 : 1;
    if (!before || before.key !== key) this.sorting = {key, direction: first};
    else if (before.direction === first) this.sorting = {key, direction: -first};
    else this.sorting = null;
    this.refresh();
    const how = this.sorting ? (this.sorting.direction > 0 ? "ascending" : "descending") : "in the original order";
    say(`Sorted by ${key}, ${how}`);
  }

  filter(accepts) {
    this.accepts = accepts;
    this.refresh();
  }

  refresh() {
    const row = this.selected();
    this.shown = this.rows.filter(this.accepts);
    if (this.sorting) {
      const {key, direction} = this.sorting;
      const value = this.columns.find((column) => column.key === key).value;
      const keyed = this.shown.map((item, i) => [value(item), i, item]);
      const missing = (item) => item === null || item === undefined || item === "";
      keyed.sort(([a, i], [b, j]) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b) || i - j;
        const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
        return direction * order || i - j;
      });
      this.shown = keyed.map((item) => item[2]);
    }
    for (const head of this.heads) {
      const direction = this.sorting && this.sorting.key === head.dataset.key ? this.sorting.direction : 0;
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : direction < 0 ? "descending" : "none");
    }
    this.current = this.shown.indexOf(row);
    this.element.setAttribute("aria-rowcount", this.shown.length + 1);
    if (!this.wraps) this.body.style.height = `${this.shown.length * ROW}px`;
    this.empty.hidden = this.shown.length > 0;
    this.clear();
    this.draw();
  }

  clear() {
    this.body.replaceChildren();
    this.made.clear();
  }

  later() {
    if (this.waits) return;
    this.waits = requestAnimationFrame(() => { this.waits = 0; this.draw(); });
  }

  draw() {
    const top = this.wraps ? 0 : Math.max(0, Math.floor(this.element.scrollTop / ROW) - BEYOND);
    const seen = Math.ceil((this.element.clientHeight || 600) / ROW) + 2 * BEYOND;
    const end = this.wraps ? this.shown.length : Math.min(this.shown.length, top + seen);
    for (const [i, made] of this.made) {
      if (i < top || i >= end) { made.remove(); this.made.delete(i); }
    }
    const fresh = document.createDocumentFragment();
    for (let i = top; i < end; i++) {
      if (!this.made.has(i)) fresh.append(this.make(i));
    }
    this.body.append(fresh);
    this.point();
  }

  make(i) {
    const row = this.shown[i];
    const made = element(
      "div", {class: `row ${this.rowClass ? this.rowClass(row) : ""}`, role: "row", id: `${this.id}-${i}`, "aria-rowindex": i + 2, "data-i": i},
      this.columns.map((column) => element("div", {role: "gridcell", class: column.align || "", "data-head": column.title || null}, column.cell(row))),
    );
    if (!this.wraps) made.style.transform = `translateY(${i * ROW}px)`;
    this.made.set(i, made);
    return made;
  }

  /* Highlights the current row. */
  point() {
    for (const [i, made] of this.made) {
      made.setAttribute("aria-selected", i === this.current);
    }
    if (this.made.has(this.current)) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.current}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  selected() {
    return this.current < 0 ? null : this.shown[this.current];
  }

  /* Selects a row and scrolls to it, unless the filter hides it. */
  select(row, {centre = false, quiet = false} = {}) {
    const i = this.shown.indexOf(row);
    if (i < 0) return false;
    this.current = i;
    const heads = this.heads[0].offsetHeight;
    const height = this.element.clientHeight - heads;
    const top = this.element.scrollTop;
    if (this.wraps) this.made.get(i).scrollIntoView({block: "nearest"});
    else if (centre) this.element.scrollTop = i * ROW - height / 2;
    else if (i * ROW < top) this.element.scrollTop = i * ROW;
    else if ((i + 1) * ROW > top + height) this.element.scrollTop = (i + 1) * ROW - height;
    this.draw();
    if (!quiet && this.onselect) this.onselect(row);
    return true;
  }

  key(event) {
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const last = this.shown.length - 1;
    const to = {
      ArrowDown: this.current + 1, ArrowUp: this.current - 1, PageDown: this.current + page, PageUp: this.current - page,
      Home: 0, End: last,
    }[event.key];
    if (to !== undefined && last >= 0) this.select(this.shown[Math.min(last, Math.max(0, to))]);
    else if (event.key === "Enter" && this.current >= 0 && this.onopen) this.onopen(this.selected());
    else return;
    event.preventDefault();
  }

  click(event) {
    const made = event.target.closest(".row");
    if (!made || event.target.closest("button, a")) return;
    const row = this.shown[Number(made.dataset.i)];
    this.select(row);
    if (this.onopen) this.onopen(row);
  }
}
