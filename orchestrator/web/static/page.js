// Keeps an open page current. The page works without this file: it is then as new as its last loading.
// The server sends whole parts as HTML that it has escaped; lines of logs are put in as text, never as HTML.

const RETRY_MS = 2000;
const MOST_LOG_LINES = 2000;
const status = document.getElementById("connection");
const waiting = new Map(); // parts that came while text in them was selected

function tell(text, state) {
  if (status && status.textContent !== text) {
    status.textContent = text;
    status.dataset.state = state;
  }
}

function isSelected(element) {
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed && element.contains(selection.anchorNode));
}

function put(name, html) {
  const part = document.getElementById(`part-${name}`);
  if (!part) return;
  if (isSelected(part) || (name === "charts" && dragged)) {
    waiting.set(name, html);
    return;
  }
  waiting.delete(name);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const href = focused && focused.getAttribute("href");
  const focusedPlot = focused ? [...part.querySelectorAll(".plot")].indexOf(focused) : -1;
  const open = [...part.querySelectorAll("details[open]")].map((one) => one.id).filter(Boolean);
  part.innerHTML = html;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (href) part.querySelector(`[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
  if (focusedPlot >= 0) part.querySelectorAll(".plot")[focusedPlot]?.focus({ preventScroll: true });
  if (name === "charts") pointAt(pointed);
}

document.addEventListener("selectionchange", () => {
  for (const [name, html] of [...waiting]) put(name, html);
});

// Charts: one place on the axis is shown in all of them, and dragging goes to the address of a part.
// Lines bring their figures along: data-x are places from 0 to WIDTH, data-y the values there in words.
const WIDTH = 1000;
let pointed = null; // the place that is pointed at
let dragged = null; // the plot and the place where a drag began

function positionText(place) {
  const charts = document.querySelector(".charts");
  const begin = Number(charts.dataset.begin);
  const value = begin + ((Number(charts.dataset.end) - begin) * place) / WIDTH;
  if (charts.dataset.kind === "step") return `step ${Math.round(value)}`;
  if (charts.dataset.kind === "span") return `${value.toFixed(0)}s`;
  return new Date(1000 * value).toLocaleTimeString([], { hour12: false });
}

// The number of the point that is nearest, if one is near.
function nearest(places, place) {
  let best = -1;
  for (let number = 0; number < places.length; number += 1) {
    if (best < 0 || Math.abs(places[number] - place) < Math.abs(places[best] - place)) best = number;
  }
  return best >= 0 && Math.abs(places[best] - place) <= WIDTH / 20 ? best : -1;
}

function pointAt(place) {
  pointed = place;
  for (const chart of document.querySelectorAll(".chart")) {
    chart.querySelector(".cursor").setAttribute("d", place === null ? "" : `M${place} 0V100`);
    chart.querySelector(".at").textContent = place === null ? "" : positionText(place);
    const values = chart.querySelectorAll(".legend .value");
    chart.querySelectorAll(".plot .line").forEach((line, number) => {
      let text = values[number].dataset.last;
      if (place !== null) {
        const found = nearest(line.dataset.x.split(" ").map(Number), place);
        text = found < 0 ? "–" : line.dataset.y.split("|")[found];
      }
      values[number].textContent = text;
    });
  }
}

function placeOf(event, plot) {
  const box = plot.getBoundingClientRect();
  return Math.round(WIDTH * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
}

function zoomTo(plot, one, other) {
  const { base, begin, end } = plot.closest(".charts").dataset;
  const address = new URL(base, location.href);
  const scale = (Number(end) - Number(begin)) / WIDTH;
  const digits = scale * WIDTH < 1e4 ? 3 : 0;
  address.searchParams.set("from", (Number(begin) + scale * Math.min(one, other)).toFixed(digits));
  address.searchParams.set("to", (Number(begin) + scale * Math.max(one, other)).toFixed(digits));
  location.assign(address);
}

function choose(plot, one, other) {
  const chosen = plot.querySelector(".chosen");
  chosen.setAttribute("x", Math.min(one, other));
  chosen.setAttribute("width", Math.abs(one - other));
}

document.addEventListener("pointermove", (event) => {
  const plot = dragged ? dragged.plot : event.target.closest?.(".plot");
  if (plot) {
    const place = placeOf(event, plot);
    pointAt(place);
    if (dragged) choose(plot, dragged.place, place);
  } else if (pointed !== null && !document.activeElement?.matches(".plot")) {
    pointAt(null);
  }
});
document.addEventListener("pointerdown", (event) => {
  const plot = event.target.closest?.(".plot");
  if (plot && event.button === 0 && event.pointerType !== "touch") {
    dragged = { plot, place: placeOf(event, plot) };
    event.preventDefault();
    plot.focus({ preventScroll: true });
  }
});
document.addEventListener("pointerup", (event) => {
  if (!dragged) return;
  const { plot, place } = dragged;
  const end = placeOf(event, plot);
  dragged = null;
  choose(plot, 0, 0);
  if (Math.abs(end - place) >= WIDTH / 100) zoomTo(plot, place, end);
});
document.addEventListener("keydown", (event) => {
  const plot = event.target.closest?.(".plot");
  const step = { ArrowLeft: -10, ArrowRight: 10, Home: -WIDTH, End: WIDTH }[event.key];
  if (plot && step !== undefined) {
    event.preventDefault();
    pointAt(Math.min(WIDTH, Math.max(0, (pointed ?? WIDTH) + (event.shiftKey ? 10 * step : step))));
    const values = [...plot.closest(".chart").querySelectorAll(".legend li")].map((one) => one.textContent.trim());
    document.getElementById("announcement").textContent = `${positionText(pointed)}: ${values.join(", ")}`;
  } else if (plot && event.key === "Escape") {
    pointAt(null);
  }
});

// A stream that is open while the page is seen, and opens again by itself.
function listen(address, handlers, ended = () => false) {
  let source = null;
  let timer = null;
  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }
  function open() {
    close();
    if (document.hidden || ended()) return;
    source = new EventSource(address);
    source.onopen = () => tell("live", "live");
    source.onerror = () => {
      close();
      if (ended()) return;
      tell("reconnecting", "lost");
      timer = setTimeout(open, RETRY_MS);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
    source.addEventListener("gone", () => {
      tell("signed out: `orch ui` signs in", "lost");
    });
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  open();
  return close;
}

const live = document.body.dataset.live;
if (live) {
  listen(live, {
    parts: (parts) => {
      for (const [name, html] of Object.entries(parts)) put(name, html);
    },
  });
}

const log = document.getElementById("log");
if (log && log.dataset.live) {
  let complete = false;
  const line = (one) => {
    const row = document.createElement("div");
    row.className = `line ${one.stream === "stderr" ? "stderr" : ""}`;
    for (const [kind, text] of [["at", one.at], ["rank", one.rank], ["text", one.text]]) {
      const cell = document.createElement("span");
      cell.className = kind;
      cell.textContent = text;
      row.append(cell, " ");
    }
    return row;
  };
  listen(
    log.dataset.live,
    {
      begin: () => log.replaceChildren(),
      lines: (lines) => {
        const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        log.append(...lines.map(line));
        while (log.childElementCount > MOST_LOG_LINES) log.firstElementChild.remove();
        if (below) log.scrollTop = log.scrollHeight;
      },
      end: () => {
        complete = true;
      },
    },
    () => complete,
  );
  log.scrollTop = log.scrollHeight;
}
