/* The run: the first fault, the graphs, and the options and versions. */

function overviewPage(data, go) {
  const graphs = data.graphs;
  const wrong = graphs.filter((graph) => graph.state === "wrong");
  const page = element("div", {class: "page overview"}, title(1, said(graphs, wrong)), data.notices.map(notice), wrong.length ? firstFault(wrong, go) : null);
  page.append(graphs.length ? graphTable(data, go)
    : notice("The dump has no graphs. They are written when a model compiled with backend=\"onnx_debug\" is called."));
  if (data.given_up.length) page.append(section("Given up by Dynamo", list(data.given_up)));
  const unchecked = graphs.flatMap((graph) => graph.unchecked.map((item) => `${graph.name}: ${item}`));
  if (unchecked.length) page.append(section("Not checked", list(unchecked)));
  if (data.unused.length) page.append(section("Registered, and not used by any graph", list(data.unused)));
  const fallbacks = data.counters.filter(([name]) => name.startsWith("fallback "));
  if (fallbacks.length) {
    page.append(section("Operators in PyTorch", plainTable(["operator", "count"], fallbacks.map(([name, times]) => [name.slice("fallback ".length), times]))));
  }
  const others = data.counters.filter(([name]) => !name.startsWith("fallback "));
  page.append(
    folded("Events", plainTable(["event", "count"], others)),
    folded("Options", plainTable(["option", "value"], data.options)),
    folded("Versions", plainTable(["package", "version"], data.versions)),
    facts([["started", data.started], ["folder", data.folder], ["forked from", data.forked_from]]),
  );
  return page;
}

function said(graphs, wrong) {
  if (!graphs.length) return "No graph was compiled";
  if (wrong.length) return `${count(wrong.length)} of ${plural(graphs.length, "graph")} ${wrong.length === 1 ? "is" : "are"} wrong`;
  const open = graphs.filter((graph) => graph.state !== "ok").length;
  if (open) return `Nothing is wrong; ${count(open)} of ${plural(graphs.length, "graph")} ${open === 1 ? "was" : "were"} not compared`;
  return graphs.length === 1 ? "The graph is right" : `All ${count(graphs.length)} graphs are right`;
}

function firstFault(wrong, go) {
  const graph = wrong.find((item) => item.culprit !== null) || wrong[0];
  return element("section", {class: "verdict wrong", "aria-label": "First fault"},
    element("p", {}, element("strong", {}, `${graph.name} ${graph.verdict}`)),
    graph.note ? element("p", {}, graph.note) : null,
    element("div", {class: "leads"}, graph.wrong_pass !== null ? passButton(graph, go) : null,
      element("button", {type: "button", class: "culprit", onclick: () => go(graph.reference, "comparison", "culprit")},
        graph.culprit === null ? "Show its comparison" : "Go to the culprit")));
}

function graphTable({graphs}, go) {
  const error = (graph, side, measure) => (graph.worst && graph.worst[side] ? graph.worst[side][measure] : null);
  const figure = (side) => ({
    key: side, title: side === "onnx" ? "worst error" : "eager's", width: side === "onnx" ? "112px" : "84px", align: "right",
    help: side === "onnx" ? "Largest absolute error of the output with the largest error relative to its scale; of a wrong graph, of the wrong value"
      : "Eager's error against float64 of the same value, where it was needed",
    value: (graph) => (error(graph, side, "nonfinite") ? Infinity : error(graph, side, "max_abs")),
    cell: (graph) => (error(graph, side, "nonfinite") ? "NaN/Inf" : number(error(graph, side, "max_abs"))),
  });
  const text = (key, head, width, value) => ({key, title: head, width, value, cell: (graph) => spanned(value(graph))});
  const figures = (key, head, width, value, shown) => ({key, title: head, width, align: "right", value, cell: (graph) => shown(value(graph))});
  const grid = new Grid({
    label: "Graphs", rows: graphs, onopen: (graph) => go(graph.reference), fits: true, height: "60vh",
    columns: [
      {key: "graph", title: "graph", width: "minmax(145px, 1fr)", value: (graph) => graphs.indexOf(graph),
        cell: (graph) => element("a", {href: `#${graph.reference}`, tabindex: -1}, graph.name)},
      {key: "state", title: "verdict", width: "144px", value: (graph) => graph.state,
        cell: (graph) => element("span", {}, badge(graph.state), " ", graph.state === "unknown" ? spanned(graph.verdict.replace(/^not comparable: /, "")) : "")},
      text("where", "where", "minmax(190px, 2fr)", (graph) => `${graph.where.function} ${short(graph.where.source)}`.trim()),
      text("end", "ended by", "minmax(150px, 3fr)", (graph) => (graph.end ? graph.end.reason : "")),
      figures("nodes", "nodes", "74px", (graph) => graph.nodes, count),
      figures("share", "on ONNX", "96px", (graph) => graph.share, percent),
      figure("onnx"), figure("eager"),
    ],
  });
  return grid.element;
}

/* A text that may be cut; the tooltip has it in full. */
function spanned(text) {
  return text ? element("span", {title: text}, text) : "";
}

function section(name, ...children) {
  return element("section", {}, title(2, name), children);
}

function folded(name, child) {
  return element("details", {}, element("summary", {}, name), child);
}

function list(texts) {
  return element("ul", {}, texts.map((text) => element("li", {}, text)));
}

function plainTable(heads, rows) {
  return element("table", {}, element("thead", {}, element("tr", {}, heads.map((head) => element("th", {scope: "col"}, head)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) => element("td", {}, cell))))));
}
