/* The page. The address selects what it shows: #graph_000/forward/comparison/relu. */

const KEYS = [
  ["/", "to the filter of the comparison"], ["c", "to the culprit"], ["Up, Down, Page Up, Page Down, Home, End", "through a table or along the plot"],
  ["Enter", "opens the selected row, or the value at the plot's cursor"], ["Escape", "closes the details"], ["Left, Right", "between the tabs, in the tab bar"], ["?", "these keys"],
];

/* Updates the address without a new history entry. */
function note(...names) {
  history.replaceState(null, "", address(names));
}

function address(names) {
  return `#${names.map((name, i) => (i === 0 ? name : encodeURIComponent(name))).join("/")}`;
}

function start() {
  const data = JSON.parse(document.getElementById("overview").textContent);
  const texts = new Map([...document.querySelectorAll("script[data-part]")].map((script) => [script.dataset.part, script]));
  const parsed = new Map();
  const part = (name) => {
    if (!parsed.has(name)) parsed.set(name, JSON.parse(texts.get(name).textContent));
    return parsed.get(name);
  };
  const content = document.getElementById("content");
  const pages = new Map();
  let page = null;
  const go = (...names) => {
    if (location.hash === address(names)) show();
    else location.hash = address(names);
  };
  const show = () => {
    const [folder, direction, tab, item] = location.hash.slice(1).split("/").map(decodeURIComponent);
    const summary = data.graphs.find((graph) => graph.reference === `${folder}/${direction}`);
    const key = summary ? summary.reference : "";
    if (!pages.has(key)) {
      pages.set(key, summary ? new GraphPage({summary, part: (name) => part(`${key}/${name}`), go})
        : {element: overviewPage(data, go)});
    }
    const before = page;
    page = pages.get(key);
    if (page !== before) content.replaceChildren(page.element);
    if (summary) page.show(TABS.some(([name]) => name === tab) ? tab : "comparison", item);
    document.title = `${summary ? `${summary.name} - ` : ""}${data.run} - dynamo-backends`;
    for (const link of document.querySelectorAll("#graphs a")) {
      if (link.dataset.key === key) {
        link.setAttribute("aria-current", "page");
        bringInSight(link, document.getElementById("graphs"));
      } else link.removeAttribute("aria-current");
    }
  };
  const links = data.graphs.map((graph) => element("a", {href: `#${graph.reference}`, "data-key": graph.reference},
    element("span", {class: `dot ${graph.state}`, "aria-hidden": "true"}), graph.name, element("span", {class: "unseen"}, `, ${STATES[graph.state]}`)));
  document.getElementById("graphs").replaceChildren(element("a", {href: "#", "data-key": ""}, "Overview"), ...links);
  keysDialog();
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    const isGraph = page instanceof GraphPage;
    if (event.key === "/" && isGraph) {
      page.show("comparison");
      page.find?.focus();
    } else if (event.key === "c" && isGraph && page.summary.culprit !== null) go(page.summary.reference, "comparison", "culprit");
    else if (event.key === "Escape" && isGraph && page.details && !page.details.hidden) page.close();
    else if (event.key === "?") document.getElementById("keys").showModal();
    else return;
    event.preventDefault();
  });
  addEventListener("hashchange", show);
  show();
}

/* Scrolls a box to an element in it. scrollIntoView would also move the Tab position. */
function bringInSight(item, box) {
  const place = item.getBoundingClientRect(), around = box.getBoundingClientRect();
  if (place.left < around.left || place.right > around.right) box.scrollLeft += place.left - around.left - 30;
  if (place.top < around.top || place.bottom > around.bottom) box.scrollTop += place.top - around.top - 30;
}

function keysDialog() {
  const dialog = document.getElementById("keys");
  dialog.append(element("h2", {id: "keys-title"}, "Keys"), facts(KEYS.map(([key, what]) => [element("kbd", {}, key), what])),
    element("form", {method: "dialog"}, element("button", {}, "Close")));
  document.getElementById("keys-button").addEventListener("click", () => dialog.showModal());
}

start();
