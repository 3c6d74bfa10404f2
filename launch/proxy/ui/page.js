// Draws what /ui/events says. All texts from outside go through textContent; nothing here makes HTML of a string.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SAVED = ["memory", "disk", "pool"];
const SOURCES = ["engine", ...SAVED];
const LOST_AFTER_MS = 15000;
const $ = (id) => document.getElementById(id);

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function title(node, text) {
  node.append(svg("title", {}, text));
  return node;
}

// --- texts for figures
const known = (value) => typeof value === "number" && isFinite(value);
function short(value, base = 1000, units = ["", "k", "M", "G", "T"]) {
  if (!known(value)) return "";
  for (const unit of units) {
    if (value < 999.5) return (value >= 99.95 || (unit === units[0] && Number.isInteger(value)) ? value.toFixed(0) : value.toFixed(1)) + unit;
    value /= base;
  }
  return value.toExponential(0);
}
const bytes = (value) => short(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const rate = (value) => (known(value) ? (value < 0.5 ? "–" : bytes(value) + "/s") : "");
const statuses = (failed) => Object.entries(failed).map(([status, count]) => `${count} × ${status === "499" ? "client left" : status}`).join(", ");
const percent = (part) => (known(part) ? Math.round(part * 100) + " %" : "");
function seconds(value) {
  if (!known(value)) return "";
  if (value < 0.0095) return (value * 1e3).toFixed(1) + " ms";
  if (value < 0.9995) return (value * 1e3).toFixed(0) + " ms";
  return value < 99.5 ? value.toFixed(1) + " s" : value.toFixed(0) + " s";
}
function ago(value) {
  if (value < 90) return value.toFixed(0) + " s ago";
  return Math.round(value / 60) + " min ago";
}
const cut = (text, most) => (text.length > most ? text.slice(0, Math.max(1, most - 1)) + "…" : text);
const sum = (list, key) => list.reduce((total, one) => total + (one[key] || 0), 0);

// --- the figures at the top
function drawFigures(state) {
  const hour = state.minutes.filter((one) => one);
  const last = state.minutes.slice(-5).filter((one) => one);
  const asked = (list) => sum(list, "computed") + SOURCES.reduce((total, source) => total + sum(list, source), 0);
  const hit = (list) => (asked(list) ? SAVED.reduce((total, tier) => total + sum(list, tier), 0) / asked(list) : NaN);
  const saved = SAVED.reduce((total, tier) => total + sum(hour, tier), 0);
  const tiles = [
    [state.requests_s < 9.95 ? state.requests_s.toFixed(1) : short(state.requests_s), `requests a second, ${state.running} in flight`],
    [short(sum(hour, "errors")), "errors (5xx) in the last hour", sum(hour, "errors") ? "down" : ""],
    [seconds(state.first_token[0]) || "–", known(state.first_token[0]) ? `first token, median of the hour; 99 % within ${seconds(state.first_token[1])}` : "first token: needs streamed answers"],
    [percent(hit(hour)) || "–", `hit in the last hour; ${percent(hit(last)) || "–"} in 5 minutes`],
    [short(Math.round(saved)), "tokens that hits saved in the last hour"],
    [seconds(state.saved_s) || "–", "of prefill that hits saved in it (estimate)"],
  ];
  $("figures").replaceChildren(...tiles.map(([value, what, as]) => el("div", { class: "tile" }, el("b", { class: as || "" }, value), el("span", {}, what))));
  document.title = $("name").textContent = state.cluster ? `${state.cluster} · pd-cache` : "pd-cache";
  $("line").textContent = `${state.nodes.length} nodes behind the proxies · version ${state.version}`;
}

// --- the picture: prefill nodes, the pool, decode nodes
const MOST_CARDS = 24;
function drawPicture(state) {
  const room = $("picture");
  const width = Math.max(280, room.clientWidth);
  const narrow = width < 640;
  const gap = narrow ? 30 : Math.min(170, width * 0.14);
  const card = { w: (width - 2 * gap) / 3, h: narrow ? 66 : 58, gap: 12 };
  const columns = { prefill: 0, pool: card.w + gap, decode: 2 * (card.w + gap) };
  const listed = (role) => state.nodes.filter((node) => node.role === role);
  const shown = { prefill: listed("prefill").slice(0, MOST_CARDS), decode: listed("decode").slice(0, MOST_CARDS) };
  const servers = listed("cache-server").slice(0, MOST_CARDS);
  const segments = state.segments.slice(0, MOST_CARDS);
  const segmentHeight = narrow ? 46 : 40;
  const poolHeight = 30 + Math.max(1, segments.length) * segmentHeight;
  const tall = (count) => count * (card.h + card.gap) - card.gap;
  const middle = poolHeight + servers.length * (card.h + card.gap);
  const height = Math.max(tall(shown.prefill.length), tall(shown.decode.length), middle, 60) + 24;
  const canvas = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Nodes, the pool, and what moves between them" });
  const edges = svg("g", {});
  const cards = svg("g", {});
  const letters = Math.floor((card.w - 26) / 7.4);
  const places = {};

  const head = (x, text) => cards.append(svg("text", { x, y: 12, class: "q" }, text));
  head(columns.prefill, "prefill");
  head(columns.pool, "the pool's memory");
  head(columns.decode, "decode");

  function place(node, x, y) {
    places[node.name] = { x, y, node };
    const group = svg("g", {});
    group.append(svg("rect", { x, y, width: card.w, height: card.h, rx: 7, class: `card ${node.state}` }));
    group.append(svg("circle", { cx: x + 11, cy: y + 14, r: 4, class: `dot ${node.state}` }));
    group.append(svg("text", { x: x + 20, y: y + 18, class: "name" }, cut(node.name, letters)));
    if (node.state === "down") {
      group.append(svg("text", { x: x + 8, y: y + 36, class: "q" }, cut(narrow ? "down" : "down: " + node.why, Math.floor(card.w / 6.2))));
    } else {
      const moves = [node.load >= 0.5 ? "↓ " + rate(node.load) : "", node.store >= 0.5 ? "↑ " + rate(node.store) : ""].filter((text) => text);
      group.append(svg("text", { x: x + 8, y: y + 35, class: "q" }, (narrow ? moves[0] : moves.join("   ")) || "idle"));
      const hit = known(node.hit) ? "hit " + percent(node.hit) : "";
      const wait = known(node.queued) && node.queued > 0 ? `${short(node.queued)} wait` : "";
      const rest = narrow ? [moves[1], hit].filter((text) => text) : [[hit, wait].filter((text) => text).join("   ")];
      rest.forEach((text, index) => group.append(svg("text", { x: x + 8, y: y + (narrow ? 48 : 50) + 13 * index, class: "q" }, text)));
    }
    cards.append(title(group, `${node.name} (${node.role}) ${node.state} ${node.why}`));
  }
  const stack = (nodes, x) => {
    const top = 20 + (height - 24 - tall(nodes.length)) / 2;
    nodes.forEach((node, index) => place(node, x, top + index * (card.h + card.gap)));
  };
  stack(shown.prefill, columns.prefill);
  stack(shown.decode, columns.decode);

  const poolTop = 20 + (height - 24 - middle) / 2;
  cards.append(svg("rect", { x: columns.pool, y: poolTop, width: card.w, height: poolHeight, rx: 7, class: "card" }));
  const used = sum(segments, "used");
  const size = sum(segments, "size");
  cards.append(svg("text", { x: columns.pool + 8, y: poolTop + 18, class: "name" }, cut(!size ? "not known" : narrow ? `${percent(used / size)} used` : `${bytes(used)} of ${bytes(size)}`, letters + 3)));
  segments.forEach((segment, index) => {
    const y = poolTop + 28 + index * segmentHeight;
    const inner = card.w - 16;
    const part = segment.size ? Math.min(1, segment.used / segment.size) : 0;
    const group = svg("g", {});
    group.append(svg("text", { x: columns.pool + 8, y: y + 10, class: "q" }, cut(segment.owner || segment.name, letters + 1)));
    group.append(svg("rect", { x: columns.pool + 8, y: y + 15, width: inner, height: 10, rx: 3, class: "empty" }));
    group.append(svg("rect", { x: columns.pool + 8, y: y + 15, width: inner * part, height: 10, rx: 3, class: "bar" }));
    cards.append(title(group, `${segment.owner || segment.name}: ${bytes(segment.used)} of ${bytes(segment.size)} (${segment.name})`));
  });
  servers.forEach((node, index) => place(node, columns.pool, poolTop + poolHeight + card.gap + index * (card.h + card.gap)));

  // edges: as wide as they are fast, in relation to the fastest
  const most = Math.max(1, ...state.nodes.map((node) => Math.max(node.load || 0, node.store || 0)));
  const thick = (value) => 1 + 7 * Math.sqrt(value / most);
  const curve = (x1, y1, x2, y2) => `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
  const poolMiddle = (y) => Math.min(poolTop + poolHeight - 22, Math.max(poolTop + 22, y));
  const line = (kind, value, d, text) => edges.append(title(svg("path", { d, class: `edge ${kind}`, "stroke-width": thick(value).toFixed(1) }), text));
  for (const role of ["prefill", "decode"]) {
    for (const node of shown[role]) {
      const at = places[node.name];
      const left = role === "prefill";
      const x1 = left ? at.x + card.w : at.x;
      const x2 = left ? columns.pool : columns.pool + card.w;
      const y = at.y + card.h / 2;
      if (node.store >= 0.5) line("store", node.store, curve(x1, y - 14, x2, poolMiddle(y) - 14), `${node.name} stores ${rate(node.store)}`);
      if (node.load >= 0.5) line("load", node.load, curve(x1, y + 14, x2, poolMiddle(y) + 14), `${node.name} loads ${rate(node.load)}`);
    }
  }
  canvas.append(edges, cards);
  room.replaceChildren(canvas);
  const more = listed("prefill").length + listed("decode").length - shown.prefill.length - shown.decode.length;
  if (more > 0) room.append(el("p", { class: "note" }, `and ${more} more; see the table below`));
}

// --- tables
function table(columns, rows, cards) {
  const head = el("tr", {}, ...columns.map((column) => el("th", { class: column.n ? "n" : "" }, column.name)));
  const body = rows.map((row) =>
    el("tr", {}, ...columns.map((column) => {
      const value = column.cell(row);
      const vacant = value === "" || value === undefined;
      const cell = el("td", { class: `${column.n ? "n" : ""} ${column.as || ""} ${vacant ? "vacant" : ""}`, "data-label": column.name });
      cell.append(value instanceof Node ? value : document.createTextNode(vacant ? "" : value));
      return cell;
    })),
  );
  return el("div", { class: "wide" }, el("table", { class: cards ? "cards" : "" }, el("thead", {}, head), el("tbody", {}, ...body)));
}

function drawSlow(state) {
  if (!state.slow.length) return $("slow").replaceChildren(el("p", { class: "sub" }, "No request yet."));
  const where = (one) => {
    const found = el("div", {});
    for (const hop of one.hops) {
      const parts = [el("span", { class: "sub" }, `${hop.hop} at `), document.createTextNode(hop.node)];
      if (hop.sources) {
        const tiers = [...SOURCES, "computed"].map((name) => [name, Math.round(hop.sources[name])]);
        parts.push(el("span", { class: "sub" }, `: ${hop.asked} tokens: ` + tiers.filter(([, count]) => count).map(([name, count]) => `${name} ${count}`).join(", ") + " "));
        if (hop.reason !== "none") parts.push(el("span", { class: "reason" }, hop.reason));
      } else {
        parts.push(el("span", { class: "sub" }, ": no report"));
      }
      found.append(el("div", {}, ...parts));
    }
    return found;
  };
  const columns = [
    { name: "request", cell: (one) => el("a", { class: "mono", title: `explain ${one.id}`, href: "/ui/requests/" + encodeURIComponent(one.id) }, cut(one.id, 36)), as: "whole title break" },
    { name: "first byte", cell: (one) => (known(one.first_byte) ? seconds(one.first_byte) : one.status === 499 ? "none: the client left" : `none: status ${one.status}`), n: true },
    { name: "in all", cell: (one) => seconds(one.seconds), n: true },
    { name: "ended", cell: (one) => ago(one.ago), n: true },
    { name: "client", cell: (one) => one.client },
    { name: "nodes, and why tokens were computed", cell: where, as: "whole block" },
  ];
  const named = state.slow.some((one) => one.client);
  return $("slow").replaceChildren(table(columns.filter((column) => named || column.name !== "client"), state.slow, true));
}

function drawNodes(state) {
  const first = (node) => (node.quantiles || {})["first token"] || [];
  const columns = [
    { name: "node", cell: (node) => node.name, as: "title break" },
    { name: "role", cell: (node) => node.role },
    { name: "state", cell: (node) => el("span", { class: node.state }, node.state) },
    { name: "hit", cell: (node) => percent(node.hit), n: true },
    { name: "loads", cell: (node) => rate(node.load), n: true },
    { name: "stores", cell: (node) => rate(node.store), n: true },
    { name: "lookups/s", cell: (node) => (known(node.lookups) ? short(node.lookups) : ""), n: true },
    { name: "first token p50", cell: (node) => seconds(first(node)[0]), n: true },
    { name: "p99", cell: (node) => seconds(first(node)[1]), n: true },
    { name: "queue", cell: (node) => (known(node.queued) ? `${short(node.queued)}+${short(node.running || 0)}` : ""), n: true },
    { name: "staging", cell: (node) => (node.staging ? percent(node.staging_used / node.staging) : ""), n: true },
    { name: "evicted/s", cell: (node) => short(node.evictions || NaN), n: true },
    { name: "why", cell: (node) => node.why || (node.missed || []).slice(0, 3).map(([reason]) => reason).join(", "), as: "whole break" },
  ];
  $("nodes").replaceChildren(table(columns, state.nodes, true));
}

// --- the last hour
function chart(width, what, label) {
  const [left, low] = [48, 120];
  const canvas = svg("svg", { viewBox: `0 0 ${width} 150`, role: "img", "aria-label": what });
  for (const part of [0, 0.5, 1]) {
    const y = low - part * 100;
    canvas.append(svg("line", { x1: left, x2: width, y1: y, y2: y, class: "grid" }));
    canvas.append(svg("text", { x: 0, y: y + 4, class: "q" }, label(part)));
  }
  for (const back of [60, 45, 30, 15, 0]) {
    const x = left + (width - left) * (1 - back / 60);
    canvas.append(svg("text", { x, y: 138, class: "q", "text-anchor": back === 0 ? "end" : back === 60 ? "start" : "middle" }, back ? `−${back} min` : "now"));
  }
  return [canvas, left, low];
}
function drawHour(state) {
  const room = $("hour");
  const width = Math.max(280, room.clientWidth);
  const [canvas, left, low] = chart(width, "Hit rate by tier, minute by minute", percent);
  const step = (width - left) / state.minutes.length;
  const slowest = Math.max(...state.minutes.map((minute) => (minute && minute.first_token[1]) || 0));
  const [times] = chart(width, "Time to the first token, minute by minute", (part) => (part ? slowest && seconds(part * slowest) : "0 s") || "");
  state.minutes.forEach((minute, index) => {
    if (!minute) return;
    const x = left + index * step;
    const when = `${state.minutes.length - 1 - index} min ago: `;
    const [median, most] = minute.first_token.map((value) => (known(value) ? low - (value / slowest) * 100 : null));
    for (const [y, bar] of known(median) ? [[most, "most"], [median, "median"]] : []) {
      const text = `${when}median ${seconds(minute.first_token[0])}, 99 % within ${seconds(minute.first_token[1])}`;
      times.append(title(svg("rect", { x, y, width: Math.max(1, step - 1.5), height: low - y, class: bar }), text));
    }
    if (minute.errors) times.append(title(svg("rect", { x, y: 12, width: Math.max(3, step - 1.5), height: 5, class: "failed" }), when + statuses(minute.failed)));
    const asked = minute.computed + SOURCES.reduce((total, source) => total + minute[source], 0);
    if (!asked) return;
    let y = low;
    const group = svg("g", {});
    group.append(svg("rect", { x, y: low - 100, width: Math.max(1, step - 1.5), height: 100, class: "blank" }));
    for (const source of SOURCES) {
      const tall = (minute[source] / asked) * 100;
      y -= tall;
      group.append(svg("rect", { x, y, width: Math.max(1, step - 1.5), height: tall, class: source }));
    }
    const text = SOURCES.filter((source) => minute[source]).map((source) => `${source} ${percent(minute[source] / asked)}`).join(", ");
    canvas.append(title(group, `${when}${minute.requests} requests; ${text || "nothing found"}`));
  });
  const hour = state.minutes.filter((one) => one);
  const all = sum(hour, "computed") + SOURCES.reduce((total, source) => total + sum(hour, source), 0);
  const shares = [...SOURCES, "computed"].map((source) => [source, sum(hour, source)]).filter(([, tokens]) => tokens);
  const untold = sum(hour, "untold");
  room.replaceChildren(canvas);
  $("times").replaceChildren(times);
  if (statuses(state.failed)) $("times").append(el("p", {}, `Requests that failed: ${statuses(state.failed)}.`));
  if (!slowest) $("times").append(el("p", { class: "sub" }, "No streamed answer in the last hour: without `stream` the first token is not seen."));
  if (all) room.append(el("p", {}, "The whole hour: " + shares.map(([source, tokens]) => `${source} ${percent(tokens / all)}`).join(", ") + "."));
  if (untold) room.append(el("p", { class: "sub" }, `${untold} of ${sum(hour, "requests")} requests came back without a report, and are not counted.`));
}

// --- following
let latest = null;
let heard = 0;
let source = null;
function draw() {
  if (!latest) return;
  drawFigures(latest);
  drawPicture(latest);
  drawHour(latest);
  drawSlow(latest);
  drawNodes(latest);
}
function verdict(state) {
  if (!state.serves) return ["down", "down: no decode node can be reached, requests are answered 503"];
  const count = (of) => state.nodes.filter((node) => node.state === of).length;
  const troubles = ["down", "degraded"].filter(count).map((of) => `${count(of)} of ${state.nodes.length} nodes ${of}`).concat(state.problems);
  return troubles.length ? ["degraded", `serving, but ${troubles.join("; ")}`] : ["up", "serving"];
}
function say(state, text) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").dataset.state = state;
  document.body.classList.toggle("stale", state === "lost" && latest !== null);
}
function follow() {
  if (source) source.close();
  heard = Date.now();
  source = new EventSource("/ui/events");
  source.onmessage = (event) => {
    heard = Date.now();
    latest = JSON.parse(event.data);
    say(...verdict(latest));
    if (!document.hidden) draw();
  };
  source.onerror = () => say("lost", "not live, connecting again");
}
setInterval(() => {
  // a browser gives up where the answer is an error, and does not notice a connection on which nothing comes
  if (source.readyState === EventSource.CLOSED || Date.now() - heard > LOST_AFTER_MS) {
    say("lost", "not live, connecting again");
    follow();
  }
}, 5000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
window.addEventListener("resize", draw);
follow();
