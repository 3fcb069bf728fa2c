/* A graph: its verdict, and a tab for each part: comparison, stages, passes, placement, time. */

const TABS = [
  ["comparison", "Comparison"], ["stages", "Stages"], ["passes", "Passes"], ["placement", "ONNX or PyTorch"], ["time", "Time"],
];
const MARKS = {"=": "bitwise equal to eager", "~": "within rounding", "!": "wrong", "?": "not deterministic", " ": "not judged"};
const KINDS = [["error", "this value"], ["eager", "eager, against float64"], ["instability", "the wrong run"]];
const MEASURES = ["max_abs", "error", "limit", "share", "max_ulp", "nonfinite", "scale"];
const STEPS = { // the last step that was taken to judge a value
  equal: "equal to eager on the same inputs", eager: "compared with eager on the same inputs", sums: "eager, and what sums may round",
  float64: "compared with float64 on the same inputs", undefined: "float64, without undefined elements", perturbed: "float64, and what perturbed inputs change",
};

class GraphPage {
  /* summary: its line of the overview; part(name): reads a part. */
  constructor({summary, part, go}) {
    Object.assign(this, {summary, part, go});
    this.panels = new Map();
    this.tabs = TABS.map(([key, name]) => element(
      "button", {type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "panel", onclick: () => go(summary.reference, key)}, name));
    const bar = element("div", {class: "tabs", role: "tablist", "aria-label": summary.name}, this.tabs);
    bar.addEventListener("keydown", (event) => this.key(event));
    this.panel = element("div", {id: "panel", role: "tabpanel"});
    this.element = element("div", {class: "page graph"}, this.head(), bar, this.panel);
  }

  head() {
    const summary = this.summary;
    const end = summary.end ? `${summary.end.reason}${summary.end.source ? ` (${short(summary.end.source)})` : ""}` : "";
    const wrong = summary.wrong_nodes.map(([name, module]) => element("button", {type: "button", class: "link", title: module, onclick: () => this.goToNode(name)}, name));
    return element(
      "div", {class: "head"},
      element("h1", {}, summary.name, " ", badge(summary.state)),
      element("div", {class: `verdict ${summary.state}`},
        element("p", {}, element("strong", {}, summary.verdict || "no run was compared"), summary.note ? ` ${summary.note}` : ""),
        element("div", {class: "leads"}, summary.wrong_pass !== null ? passButton(summary, this.go) : null,
          summary.culprit !== null ? element("button", {type: "button", class: "culprit", onclick: () => this.go(summary.reference, "comparison", "culprit")}, "Go to the culprit") : null)),
      facts([
        ["in", `${summary.where.function} ${short(summary.where.source)}`.trim()], ["ended by", end], ["operators", count(summary.nodes)],
        ["on ONNX", `${percent(summary.share)} in ${plural(summary.regions, "region")}`], ["compiled in", summary.seconds ? seconds(summary.seconds) : ""],
        ["runs", count(summary.runs)], ["compared with", summary.reference_kind], ["not checked", summary.unchecked.join("; ")],
        ["wrong by themselves", wrong.length > 1 ? element("span", {class: "links"}, wrong, summary.more_wrong_nodes ? ` and ${count(summary.more_wrong_nodes)} more` : null) : ""],
      ]),
    );
  }

  key(event) {
    const i = this.tabs.indexOf(event.target);
    const to = {ArrowRight: i + 1, ArrowLeft: i - 1 + this.tabs.length, Home: 0, End: this.tabs.length - 1}[event.key];
    if (to === undefined) return;
    const tab = this.tabs[to % this.tabs.length];
    tab.click();
    tab.focus();
    event.preventDefault();
  }

  show(key, item) {
    for (const tab of this.tabs) {
      const chosen = tab.id === `tab-${key}`;
      tab.setAttribute("aria-selected", chosen);
      tab.setAttribute("tabindex", chosen ? 0 : -1);
    }
    this.panel.setAttribute("aria-labelledby", `tab-${key}`);
    if (!this.panels.has(key)) this.panels.set(key, this.make(key));
    const made = this.panels.get(key);
    this.panel.dataset.tab = key;
    this.panel.replaceChildren(...made.elements);
    if (made.show) made.show(item);
  }

  make(key) {
    const data = this.part(key);
    if (data.notice) return {elements: [notice(`The dump cannot be read: ${data.notice}`)]};
    return {
      comparison: () => this.comparison(), stages: () => stagesPanel(data), passes: () => passesPanel(data, this.summary.blamed),
      placement: () => placementPanel(data, (name) => this.goToNode(name)), time: () => timePanel(data),
    }[key]();
  }

  goToNode(name) {
    this.go(this.summary.reference, "comparison", name);
  }

  /* The rows as objects, with their readers. */
  rows() {
    if (this.made) return this.made;
    const data = this.part("comparison");
    this.made = data.rows.map((row, i) => {
      Object.assign(row, {i, readers: []});
      row.place = row.region !== null ? `region ${row.region}` : row.operator === "placeholder" || row.operator === "get_attr" ? "input" : "PyTorch";
      row.text = [row.name, row.user_name, row.operator, row.module, row.source, row.dtype, row.complaint, row.step].join(" ").toLowerCase();
      return row;
    });
    for (const row of this.made) {
      for (const other of row.inputs) this.made[other].readers.push(row.i);
    }
    this.culprit = data.culprit === null ? null : this.made[data.culprit];
    return this.made;
  }

  comparison() {
    const rows = this.rows();
    const isTaken = (row) => row.operator === "placeholder" || row.operator === "get_attr";
    const grid = new Grid({ // computed values first
      label: `Values of ${this.summary.name}`, rows: [...rows.filter((row) => !isTaken(row)), ...rows.filter(isTaken)], columns: comparisonColumns(),
      rowClass: (row) => (row === this.culprit ? "bad" : row.mark === "!" || row.mark === "?" ? "suspect" : ""),
      onselect: (row) => this.chosen(row), onopen: (row) => this.open(row),
    });
    this.grid = grid;
    const compared = rows.filter((row) => !row.is_view && row.error);
    this.plot = new Plot({
      rows: compared, distance: (row, key) => row[key], name: (row) => row.user_name || row.name, culprit: compared.indexOf(this.culprit),
      onpick: (row) => { this.reach(row); this.open(row); grid.element.focus({preventScroll: true}); },
    });
    const find = this.find = element("input", {type: "search", id: "filter", placeholder: "name, operator, module, line …", "aria-label": "Filter the values", spellcheck: "false"});
    const marks = element("select", {"aria-label": "Only with this mark"}, element("option", {value: ""}, "every mark"),
      Object.entries(MARKS).filter(([mark]) => rows.some((row) => row.mark === mark)).map(([mark, name]) => element("option", {value: mark}, `${mark} ${name}`)));
    const places = element("select", {"aria-label": "Only this engine"}, element("option", {value: ""}, "everywhere"),
      [...new Set(rows.map((row) => row.place))].map((place) => element("option", {value: place}, place)));
    const shown = element("span", {class: "shown", role: "status"});
    const filter = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      grid.filter((row) => (!marks.value || row.mark === marks.value) && (!places.value || row.place === places.value) && words.every((word) => row.text.includes(word)));
      shown.textContent = grid.shown.length === rows.length ? plural(rows.length, "value") : `${count(grid.shown.length)} of ${plural(rows.length, "value")}`;
    };
    for (const control of [find, marks, places]) control.addEventListener("input", filter);
    find.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "ArrowDown") { grid.element.focus(); if (grid.current < 0) grid.select(grid.shown[0]); event.preventDefault(); }
      if (event.key === "Escape") { find.value = ""; filter(); }
    });
    this.unfilter = () => { find.value = marks.value = places.value = ""; filter(); };
    filter();
    const legend = folded("What the columns mean", element("div", {class: "legend"},
      facts(Object.entries(MARKS).map(([mark, name]) => [mark === " " ? "blank" : mark, name])),
      element("p", {}, "Each value of the run is compared with PyTorch on the numbers that the run computed it from, so that no error of an earlier node is in "
        + "it. error: the largest absolute error. share: the largest multiple of an element's tolerance; above 1 the value is wrong. step: what decided. with: nodes "
        + "before it whose values the session does not have, which are judged together with it.")));
    this.details = element("aside", {class: "details", "aria-label": "Details of a value", tabindex: -1, hidden: true});
    const tools = element("div", {class: "tools"}, find, marks, places, shown, element("span", {class: "grow"}), legend);
    const elements = [compared.length ? this.plot.element : notice("No value of this graph was compared."), tools, grid.element, this.details];
    return {elements, show: (item) => {
      if (!item) return;
      const row = item === "culprit" ? this.culprit : rows.find((other) => other.name === item) || rows.find((other) => other.name.replace(/__\d+$/, "") === item);
      if (!row) { if (item !== "culprit") say(`No value ${item} here`); return; }
      this.reach(row);
      this.open(row);
      grid.element.focus({preventScroll: true});
    }};
  }

  /* Selects a row, and clears the filter if it hides the row. */
  reach(row) {
    if (!this.grid.shown.includes(row)) this.unfilter();
    this.grid.select(row, {centre: true});
  }

  chosen(row) {
    const i = this.plot.rows.indexOf(row);
    if (i >= 0) this.plot.show(i, true);
    if (!this.details.hidden) this.describe(row);
  }

  open(row) {
    const wasOpen = !this.details.hidden;
    this.details.hidden = false;
    this.describe(row);
    this.grid.select(row, {quiet: true, centre: !wasOpen}); // the details shrink the table
    note(this.summary.reference, "comparison", row.name);
  }

  describe(row) {
    const link = (i) => element("button", {type: "button", class: "link", onclick: () => { this.reach(this.made[i]); this.open(this.made[i]); }}, this.made[i].user_name || this.made[i].name);
    const links = (items) => (items.length ? element("span", {class: "links"}, items.slice(0, 40).map(link), items.length > 40 ? ` and ${items.length - 40} more` : null) : "");
    const figures = KINDS.filter(([key]) => row[key] && row.step !== "equal").map(([key, name]) => [name, ...MEASURES.map((measure) => number(row[key][measure]))]);
    const frames = this.part("comparison").frames;
    this.details.replaceChildren(
      element("div", {class: "about"},
        element("div", {class: "bar"}, element("h2", {}, row.user_name || row.name),
          row === this.culprit ? element("span", {class: "badge wrong"}, "culprit") : null, row.is_output ? element("span", {class: "badge"}, "result of the graph") : null,
          element("span", {class: "grow"}),
          element("button", {type: "button", class: "close", "aria-label": "Close the details", onclick: () => this.close()}, "\u00d7")),
        row.complaint ? notice(row.complaint) : null,
        facts([
          ["FX node", row.user_name ? row.name : ""], ["operator", row.operator], ["module", row.module], ["line", row.source],
          ["type", `${row.dtype} ${row.shape || "scalar"}`], ["computed in", row.place], ["mark", MARKS[row.mark] || row.mark],
          ["value of", row.origin || "eager: the session does not have it"], ["judged by", row.error ? STEPS[row.step] || row.step : ""],
          ["together with", links(row.segment)], ["reads", links(row.inputs)], ["read by", links(row.readers)],
        ])),
      figures.length || row.onnx_nodes.length ? element("div", {class: "measures"},
        figures.length ? [element("h3", {}, "Error on the same inputs"),
          plainTable(["", "largest", "of the worst element", "its tolerance", "share", "ulp", "NaN/Inf", "scale"], figures)] : null,
        row.onnx_nodes.length ? element("section", {}, element("h3", {}, "ONNX nodes"), row.onnx_nodes.map((text) => element("code", {class: "onnx-node"}, text))) : null,
        row.elements ? wrongElements(row.elements) : null) : element("div", {}),
      element("div", {class: "stack"}, element("h3", {}, "Call stack"), row.stack.length ? stackOf(row.stack.map((i) => frames[i])) : element("p", {}, row.source || "unknown source line")));
  }

  close() {
    this.details.hidden = true;
    this.grid.element.focus();
  }
}

/* A button to the diff of the wrong pass. */
function passButton(summary, go) {
  return element("button", {type: "button", class: "culprit", onclick: () => go(summary.reference, "passes", summary.wrong_pass)}, "Go to the diff of the pass");
}

/* The worst elements of a wrong value. */
function wrongElements(found) {
  const value = (item) => (typeof item === "number" ? String(Number(item.toPrecision(6))) : item);
  const names = Object.keys((found.worst[0] || {inputs: {}}).inputs);
  return element("section", {class: "elements"}, element("h3", {}, "Wrong elements"), element("p", {}, found.text),
    plainTable(["element", ...names, "actual", "expected", "tolerance"], found.worst.map((item) => (
      [`[${item.index.join(", ")}]`, ...names.map((name) => value(item.inputs[name])), value(item.actual), value(item.expected), number(item.limit)]))));
}

function comparisonColumns() {
  const text = (key, head, width, value, help) => ({key, title: head, width, help, value, cell: (row) => spanned(value(row))});
  const worst = (row, key) => (!row.error ? null : row.error.nonfinite || row.error[key] === null ? Infinity : row.error[key]);
  return [
    {key: "number", title: "#", width: "46px", align: "right", help: "Execution order", value: (row) => row.i, cell: (row) => String(row.i + 1)},
    {key: "mark", title: "", width: "30px", help: "mark", value: (row) => " =~?!".indexOf(row.mark),
      cell: (row) => element("span", {class: `mark ${row.mark === "!" || row.mark === "?" ? "suspect" : ""}`, title: MARKS[row.mark] || ""}, row.mark)},
    {key: "value", title: "value", width: "minmax(132px, 2fr)", value: (row) => row.user_name || row.name,
      cell: (row) => element("span", {title: row.user_name ? `${row.user_name} (${row.name})` : row.name}, row.user_name || row.name, row.is_output ? " \u25b8" : "")},
    text("operator", "operator", "minmax(92px, 1fr)", (row) => row.operator.replace(/^aten\./, "").replace(/\.default$/, "")),
    text("type", "type", "minmax(116px, 1fr)", (row) => `${row.dtype} ${row.shape || "scalar"}`),
    {key: "error", title: "error", width: "84px", align: "right", help: "Largest absolute error against PyTorch on the same inputs", value: (row) => worst(row, "max_abs"),
      cell: (row) => (!row.error ? "" : row.error.nonfinite ? `${row.error.nonfinite} NaN/Inf` : number(row.error.max_abs))},
    {key: "share", title: "share", width: "72px", align: "right", help: "Largest multiple of an element's tolerance; above 1 the value is wrong", value: (row) => worst(row, "share"),
      cell: (row) => (!row.error ? "" : worst(row, "share") === Infinity ? "\u221e" : number(row.error.share))},
    text("step", "step", "88px", (row) => (row.error ? row.step : ""), "The last step that was taken to judge it"),
    {key: "segment", title: "with", width: "60px", align: "right", help: "Nodes before it that are judged together with it", value: (row) => row.segment.length,
      cell: (row) => (row.segment.length ? count(row.segment.length) : "")},
    text("module", "module", "minmax(100px, 2fr)", (row) => row.module), text("source", "line", "minmax(110px, 2fr)", (row) => short(row.source)),
  ];
}

function stackOf(frames) {
  return element("ol", {}, frames.map(([file, line, name, code, isUser]) => element("li", {class: isUser ? "user" : ""},
    element("span", {class: "place"}, `${isUser ? "" : short(file)}${isUser ? file : ""}:${line}`), name ? ` in ${name}` : "", code ? element("code", {}, code) : null)));
}

function stagesPanel(data) {
  const stages = data.stages;
  const holder = element("div", {class: "holder"});
  const changes = element("input", {type: "checkbox"});
  let now = Math.max(0, stages.findIndex((stage) => stage.difference.length));
  const size = (stage) => {
    if (stage.notice) return "missing";
    if (stage.same_as && stage.same_as === stage.after) return `same as ${stage.same_as}`;
    const added = stage.difference.filter((line) => line[0] === "+").length, removed = stage.difference.filter((line) => line[0] === "-").length;
    return added + removed ? `+${count(added)} \u2212${count(removed)}` : stage.after ? "no change" : "";
  };
  const buttons = stages.map((stage, i) => element(
    "button", {type: "button", onclick: () => { now = i; draw(); }}, element("span", {}, stage.name),
    element("small", {}, [stage.nodes !== null ? plural(stage.nodes, "node") : "", size(stage)].filter(Boolean).join(", "))));
  const draw = () => {
    const stage = stages[now];
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === now));
    if (stage.notice) return holder.replaceChildren(notice(stage.notice));
    if (changes.checked && !stage.difference.length) {
      return holder.replaceChildren(notice(stage.after ? `Nothing changed between ${stage.after} and ${stage.name}.` : "This is the first stage."));
    }
    const lines = changes.checked ? stage.difference : stage.lines.length ? stage.lines : (stages.find((other) => other.name === stage.same_as) || stage).lines;
    holder.replaceChildren(new Lines(changes.checked ? `From ${stage.after} to ${stage.name}` : stage.name, lines, changes.checked).element);
  };
  changes.checked = true;
  changes.addEventListener("change", draw);
  const chooser = element("div", {class: "chooser"}, element("label", {}, changes, "show changes since the previous stage"),
    element("div", {role: "group", "aria-label": "Stages"}, buttons));
  return {elements: [chooser, holder], show: draw};
}

/* blamed: the value that the verdict names, to which the diff of a pass scrolls. */
function passesPanel(data, blamed) {
  const below = element("div", {class: "holder"});
  const figures = (key, head, width) => ({key, title: head, width, align: "right", value: (row) => row[key], cell: (row) => count(row[key])});
  const grid = new Grid({
    label: "Passes", rows: data.passes, fits: true, height: "45vh",
    rowClass: (row) => (row.undone ? "suspect" : row.fired ? "" : "quiet"),
    columns: [
      {key: "name", title: "pass", width: "minmax(200px, 2fr)", value: (row) => row.name, cell: (row) => spanned(row.name)},
      {key: "where", title: "in", width: "90px", value: (row) => row.where || "the graph", cell: (row) => row.where || "the graph"},
      figures("fired", "fired", "80px"), figures("nodes_before", "nodes", "80px"), figures("nodes_after", "after", "80px"),
      {key: "ms", title: "ms", width: "80px", align: "right", value: (row) => row.milliseconds, cell: (row) => milliseconds(row.milliseconds)},
      figures("near_misses", "near misses", "110px"),
      {key: "said", title: "note", width: "minmax(120px, 2fr)", value: (row) => row.said, cell: (row) => spanned(row.said)},
    ],
    onselect: (row) => {
      if (!row.difference.length) return below.replaceChildren(notice(row.fired ? `The dump has no diff of ${row.name}.` : `${row.name} changed nothing.`));
      const lines = new Lines(`What ${row.name} changed`, row.difference, true);
      below.replaceChildren(lines.element);
      if (blamed) lines.find(blamed);
    },
  });
  const fired = data.passes.find((row) => row.fired);
  return {elements: [data.passes.length ? grid.element : notice("No pass ran."), below], show: (item) => {
    const row = data.passes.find((other) => `${other.where} ${other.name}`.trim() === item) || (grid.selected() ? null : fired);
    if (row) grid.select(row);
  }};
}

function placementPanel(data, goToNode) {
  const reasons = new Map();
  for (const [, , reason] of data.in_pytorch) reasons.set(reason, (reasons.get(reason) || 0) + 1);
  const elements = [title(2, "Regions on ONNX Runtime"), data.regions.length
    ? plainTable(["region", "operators", "ONNX nodes", "after our passes"], data.regions.map(([index, ...figures]) => [`region_${index}`, ...figures.map(count)]))
    : notice("No operator of this graph runs on ONNX Runtime."),
    ...data.failed.map(([index, why]) => notice(`PyTorch ran region_${index}: ${why}`))];
  elements.push(title(2, data.in_pytorch.length ? `${plural(data.in_pytorch.length, "operator")} in PyTorch` : "No operator in PyTorch"));
  if (data.in_pytorch.length) {
    elements.push(plainTable(["why", "operators"], [...reasons].sort((a, b) => b[1] - a[1]).map(([reason, n]) => [reason, count(n)])));
    const column = (i, head, width) => ({key: head, title: head, width, value: (row) => row[i], cell: (row) => spanned(i === 3 ? short(row[i]) : row[i])});
    const grid = new Grid({
      label: "Operators in PyTorch", rows: data.in_pytorch, fits: true, height: "45vh", onopen: (row) => goToNode(row[0]),
      columns: [column(0, "node", "minmax(120px, 1fr)"), column(1, "operator", "minmax(190px, 1fr)"), column(2, "why", "minmax(200px, 2fr)"), column(3, "line", "minmax(190px, 1fr)")],
    });
    elements.push(grid.element);
  }
  if (data.products.length) {
    const column = (i, head) => ({key: head, title: head, width: "minmax(120px, 1fr)", value: (row) => row[i], cell: (row) => spanned(i === 3 ? short(row[i]) : row[i])});
    const grid = new Grid({
      label: "Products", rows: data.products, fits: true, height: "45vh", onopen: (row) => goToNode(row[0]),
      columns: [column(0, "node"), column(1, "kernel"), column(2, "operands"), column(3, "line"), column(4, "why in float32")],
    });
    elements.push(title(2, "Products on ONNX Runtime"), grid.element);
  }
  return {elements};
}

function timePanel(data) {
  const elements = [title(2, "Compile time by stage"), data.seconds.length ? bars(data.seconds.map(([name, value]) => [name, value, seconds(value)])) : notice("The dump has no compile times.")];
  const run = data.regions.map(([index, ms]) => [`region ${index}`, ms, `${milliseconds(ms)} ms`]);
  if (data.pytorch !== null) run.push(["PyTorch", data.pytorch, `${milliseconds(data.pytorch)} ms`]);
  elements.push(title(2, "The compared run"), run.length ? bars(run) : notice("No run was compared."));
  if (data.crossing_tensors) elements.push(element("p", {}, `${plural(data.crossing_tensors, "tensor")} of ${bytes(data.crossing_bytes)} crossed between ONNX Runtime and PyTorch.`));
  elements.push(element("p", {}, "The time of each operator: ", element("code", {}, `dynamo-backends profile ${data.reference}`)));
  return {elements};
}

function bars(rows) {
  const most = Math.max(...rows.map((row) => row[1]), 1e-12);
  return element("dl", {class: "bars"}, rows.map(([name, value, text]) => {
    const bar = element("i", {});
    bar.style.width = `${Math.max(0.3, value / most * 100)}%`;
    return element("div", {}, element("dt", {}, name), element("dd", {}, element("span", {class: "track", "aria-hidden": "true"}, bar), text));
  }));
}
