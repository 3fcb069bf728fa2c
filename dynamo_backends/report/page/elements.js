"use strict";

/* Creates elements and texts. Data becomes text nodes and attributes, never markup. */

/* element("p", {class: "note", onclick: f}, "text", child, …): null children are skipped. */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child); // a string becomes a text node
  }
  return made;
}

/* Announces a change to screen readers. */
function say(text) {
  document.getElementById("said").textContent = text;
}

function number(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.01 && size < 10000) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

function count(value) {
  return value === null || value === undefined ? "" : value.toLocaleString("en-US");
}

function percent(share) {
  // 99.97 % must not be rounded to 100 %
  return share === 1 ? "100 %" : `${(Math.floor(share * 1000) / 10).toFixed(1)} %`;
}

function seconds(value) {
  return value >= 10 ? `${value.toFixed(0)} s` : value >= 0.1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(0)} ms`;
}

function milliseconds(value) {
  return value === null || value === undefined ? "" : value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toFixed(3);
}

function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB"];
  let i = 0;
  while (value >= 1000 && i < units.length - 1) [value, i] = [value / 1000, i + 1];
  return `${i ? value.toFixed(1) : value} ${units[i]}`;
}

/* The last two parts of a path: enough to find the file. */
function short(source) {
  return source.split(", called from ").map((place) => place.split("/").slice(-2).join("/")).join(", called from ");
}

function plural(n, name) {
  return `${count(n)} ${name}${n === 1 ? "" : "s"}`;
}

function notice(text) {
  return element("p", {class: "notice", role: "note"}, text);
}

/* facts: [name, value] pairs; a value is text or an element. */
function facts(pairs) {
  return element(
    "dl", {class: "facts"},
    pairs.filter((pair) => pair[1] !== "" && pair[1] !== null).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

function title(level, text) {
  return element(`h${level}`, {}, text);
}

const STATES = {ok: "ok", wrong: "wrong", unknown: "not comparable", none: "not compared"};

function badge(state) {
  return element("span", {class: `badge ${state}`}, STATES[state]);
}
