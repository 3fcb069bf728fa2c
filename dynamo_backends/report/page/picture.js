/*
 * A drawing of a graph, or of the part around a node, with inputs above the nodes that read them.
 *
 * Layered by Sugiyama's method: the layer of a node is its longest path from a source, edges over several layers get a bend
 * in each, and a few sweeps move nodes towards the mean position of their neighbours. The browser computes it, so that it
 * can be drawn around any node.
 */

const BOX = {height: 34, gap: 14, between: 30, widest: 190, letter: 6.7};

/* nodes: {id, reads: [id], width}; returns {places: Map id -> {x, y, width}, edges: [{from, to, points}], width, height}. */
function layered(nodes) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const layer = new Map();
  const layerOf = (id) => {
    if (!layer.has(id)) {
      layer.set(id, 0); // also stops at a cycle, which a damaged file could have
      const above = known.get(id).reads.filter((other) => known.has(other)).map((other) => layerOf(other) + 1);
      layer.set(id, Math.max(0, ...above));
    }
    return layer.get(id);
  };
  nodes.forEach((node) => layerOf(node.id));
  for (const node of nodes) { // sources, such as weights, go next to their first reader
    if (node.reads.some((id) => known.has(id))) continue;
    const below = nodes.filter((other) => other.reads.includes(node.id)).map((other) => layer.get(other.id));
    if (below.length) layer.set(node.id, Math.min(...below) - 1);
  }
  const layers = [];
  const put = (cell, i) => (layers[i] = layers[i] || []).push(cell);
  for (const node of nodes) put({id: node.id, width: node.width, up: [], down: []}, layer.get(node.id));
  const cells = new Map(layers.flat().map((cell) => [cell.id, cell]));
  const edges = [];
  for (const node of nodes) {
    for (const id of node.reads.filter((item) => known.has(item))) {
      const way = [cells.get(id)];
      for (let i = layer.get(id) + 1; i < layer.get(node.id); i++) {
        const bend = {id: null, width: 4, up: [], down: []};
        put(bend, i);
        way.push(bend);
      }
      way.push(cells.get(node.id));
      for (let i = 1; i < way.length; i++) { way[i - 1].down.push(way[i]); way[i].up.push(way[i - 1]); }
      edges.push({from: id, to: node.id, way});
    }
  }
  for (const cellsOf of layers) cellsOf.forEach((cell, i) => { cell.order = i; });
  for (let sweep = 0; sweep < 8; sweep++) {
    const down = sweep % 2 === 0;
    for (const cellsOf of down ? layers : [...layers].reverse()) {
      const mean = new Map(cellsOf.map((cell) => {
        const near = down ? cell.up : cell.down;
        return [cell, near.length ? near.reduce((sum, other) => sum + other.order, 0) / near.length : cell.order];
      }));
      cellsOf.sort((a, b) => mean.get(a) - mean.get(b)).forEach((cell, i) => { cell.order = i; });
    }
  }
  return placed(layers, edges);
}

/* Places nodes from left to right, then moves each layer towards its neighbours as far as there is room. */
function placed(layers, edges) {
  for (const cells of layers) {
    let x = 0;
    for (const cell of cells) { cell.x = x + cell.width / 2; x += cell.width + BOX.gap; }
  }
  for (let sweep = 0; sweep < 6; sweep++) {
    for (const cells of sweep % 2 === 0 ? layers : [...layers].reverse()) {
      const wanted = cells.map((cell) => {
        const near = [...cell.up, ...cell.down];
        return near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : cell.x;
      });
      apart(cells, wanted);
    }
  }
  const all = layers.flat();
  const left = Math.min(...all.map((cell) => cell.x - cell.width / 2));
  const places = new Map();
  layers.forEach((cells, i) => {
    for (const cell of cells) {
      cell.x -= left - 8;
      cell.y = 8 + i * (BOX.height + BOX.between);
      if (cell.id !== null) places.set(cell.id, {x: cell.x, y: cell.y, width: cell.width});
    }
  });
  return {
    places,
    edges: edges.map(({from, to, way}) => ({from, to, points: way.map((cell) => [cell.x, cell.y])})),
    width: Math.max(...all.map((cell) => cell.x + cell.width / 2)) + 8,
    height: 16 + layers.length * (BOX.height + BOX.between) - BOX.between,
  };
}

/* Moves the cells of a layer as close to their wanted positions as their widths and their order allow. */
function apart(cells, wanted) {
  const blocks = []; // touching cells move together, by the mean of their wanted shifts
  cells.forEach((cell, i) => {
    let block = {cells: [cell], offsets: [0], sum: wanted[i], start: wanted[i]};
    for (let last = blocks.at(-1); last; last = blocks.at(-1)) {
      const end = last.cells.at(-1);
      const step = (end.width + block.cells[0].width) / 2 + BOX.gap;
      if (last.start + last.offsets.at(-1) + step <= block.start) break;
      const shift = last.offsets.at(-1) + step;
      const joined = {cells: [...last.cells, ...block.cells], offsets: [...last.offsets, ...block.offsets.map((offset) => offset + shift)]};
      joined.sum = last.sum + block.sum - shift * block.cells.length;
      joined.start = joined.sum / joined.cells.length;
      blocks.pop();
      block = joined;
    }
    blocks.push(block);
  });
  for (const block of blocks) block.cells.forEach((cell, i) => { cell.x = block.start + block.offsets[i]; });
}

/*
 * nodes: {id, label, operator, kind, reads, title}; chosen: the highlighted id; onpick(id).
 * Each node is a button: Tab and the arrows go through them in execution order, Enter picks.
 */
function picture(nodes, chosen, label, onpick) {
  const cut = (text) => (text.length * BOX.letter > BOX.widest - 16 ? `${text.slice(0, Math.floor((BOX.widest - 16) / BOX.letter) - 1)}…` : text);
  const sized = nodes.map((node) => {
    const letters = Math.max(cut(node.label).length, cut(node.operator).length);
    return {...node, width: Math.max(60, letters * BOX.letter + 16)};
  });
  const {places, edges, width, height} = layered(sized);
  const lines = edges.map(({from, to, points}) => {
    const bends = points.map(([x, y], i) => {
      const last = i === points.length - 1;
      if (i === 0) return `M${x} ${y + BOX.height}`;
      const [before, above] = points[i - 1];
      const middle = (above + BOX.height + y) / 2;
      return `C${before} ${middle} ${x} ${middle} ${x} ${y}${last ? "" : `V${y + BOX.height}`}`;
    });
    return svg("path", {d: bends.join(""), class: "edge", "data-from": from, "data-to": to});
  });
  const boxes = sized.map((node) => {
    const {x, y} = places.get(node.id);
    return svg(
      "g", {class: `node ${node.kind}${node.id === chosen ? " chosen" : ""}`, role: "button", tabindex: node.id === chosen ? 0 : -1,
        "data-id": node.id, "aria-label": node.title, transform: `translate(${x - node.width / 2} ${y})`, onclick: () => onpick(node.id)},
      svg("title", {}, node.title), svg("rect", {width: node.width, height: BOX.height, rx: 5}),
      svg("text", {x: node.width / 2, y: 14, class: "operator"}, cut(node.operator)),
      svg("text", {x: node.width / 2, y: 28}, cut(node.label)),
    );
  });
  if (!boxes.some((box) => box.getAttribute("tabindex") === "0") && boxes.length) boxes[0].setAttribute("tabindex", "0");
  const drawn = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label}, lines, boxes);
  drawn.addEventListener("keydown", (event) => {
    const i = boxes.indexOf(event.target);
    const to = {ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: boxes.length - 1}[event.key];
    if (i < 0) return;
    if (event.key === "Enter" || event.key === " ") onpick(Number(event.target.dataset.id));
    else if (to !== undefined && boxes[to]) {
      boxes[i].setAttribute("tabindex", "-1");
      boxes[to].setAttribute("tabindex", "0");
      boxes[to].focus();
    } else return;
    event.preventDefault();
  });
  const holder = element("div", {class: "picture"}, drawn);
  const place = places.get(chosen);
  if (place) requestAnimationFrame(() => {
    holder.scrollLeft = place.x - holder.clientWidth / 2;
    holder.scrollTop = place.y - holder.clientHeight / 2;
  });
  return holder;
}

/* The nodes nearest to one, along inputs and readers, at most a number; in execution order. */
function around(start, most, reads, readers) {
  const found = new Set([start]);
  let edge = [start];
  while (edge.length && found.size < most) {
    const next = [];
    for (const id of edge) {
      for (const other of [...reads(id), ...readers(id)]) {
        if (!found.has(other) && found.size < most) { found.add(other); next.push(other); }
      }
    }
    edge = next;
  }
  return [...found].sort((a, b) => a - b);
}
