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
  if (isSelected(part)) {
    waiting.set(name, html);
    return;
  }
  waiting.delete(name);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const href = focused && focused.getAttribute("href");
  const open = [...part.querySelectorAll("details[open]")].map((one) => one.id).filter(Boolean);
  part.innerHTML = html;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (href) part.querySelector(`[href="${CSS.escape(href)}"]`)?.focus({ preventScroll: true });
}

document.addEventListener("selectionchange", () => {
  for (const [name, html] of [...waiting]) put(name, html);
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
