/* One table of an operator tool's results, with sorting, filtering and keyboard navigation; wrong rows are marked. */

function start() {
  const data = JSON.parse(document.getElementById("overview").textContent);
  const rows = data.rows.map((cells, i) => ({cells, i, wrong: data.wrong.includes(i), text: cells.join(" ").toLowerCase()}));
  const shown = (value) => (typeof value === "number" ? number(value) : value === null ? "" : element("span", {title: value}, value));
  const numeric = data.headers.map((_, i) => rows.every((row) => row.cells[i] === null || typeof row.cells[i] === "number"));
  const longest = (i) => Math.max(0, ...rows.map((row) => String(row.cells[i] ?? "").length));
  const width = (i) => (numeric[i] ? "92px" : `minmax(${Math.min(230, Math.max(64, 8 * longest(i)))}px, ${Math.ceil(longest(i) / 12) || 1}fr)`);
  const grid = new Grid({
    label: data.title, rows, rowClass: (row) => (row.wrong ? "wrong" : ""),
    columns: data.headers.map((head, i) => ({key: head, title: head, width: width(i), align: numeric[i] ? "right" : "",
      value: (row) => row.cells[i], cell: (row) => shown(row.cells[i])})),
  });
  const find = element("input", {type: "search", id: "filter", placeholder: "operator, value, line …", "aria-label": "Filter the rows", spellcheck: "false"});
  const only = element("input", {type: "checkbox", id: "only"});
  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    grid.filter((row) => (!only.checked || row.wrong) && words.every((word) => row.text.includes(word)));
  };
  for (const control of [find, only]) control.addEventListener("input", filter);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== find) {
      find.focus();
      event.preventDefault();
    } else if (event.key === "Escape" && event.target === find) {
      find.value = "";
      filter();
    }
  });
  const wrongs = data.wrong.length ? element("label", {}, only, ` only wrong rows (${count(data.wrong.length)})`) : null;
  document.getElementById("content").replaceChildren(element("div", {class: "page graph"}, title(1, data.title), data.notices.map(notice),
    element("p", {class: "tools"}, find, " ", wrongs), grid.element));
}

start();
