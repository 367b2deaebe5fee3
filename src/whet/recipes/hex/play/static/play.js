// The page of a Hex game. It keeps the moves (also in its URL), and requests the view of the game from the server.
import { drawBoard } from "./board.js";
import { el, fill } from "./dom.js";
import { fetchJson } from "./server.js";
import { themeButton } from "./theme.js";

const AGAIN_MS = 3000;
const BAD_GAME = 400;
const page = document.getElementById("page");
const about = await fetchUntilAnswered("/api/about");
const game = { size: about.size, color: about.color, moves: [], seed: 0 };
Object.assign(game, { view: null, resigned: null, isThinking: false });
let showsHints = false;
let requested = 0;

const boardPlace = el("div", { class: "card board-card" });
const standing = el("p", { class: "standing", role: "status" });
const note = el("p", { class: "notice bad", hidden: true });
const winBar = el("div", { class: "part" });
const range = { "aria-valuemin": 0, "aria-valuemax": 100 };
const meter = el("div", { class: "win", role: "meter", "aria-label": "chance of blue", ...range }, winBar);
const winWords = el("div", { class: "win-words" });
const swapButton = button("swap", () => play("swap"));
const undoButton = button("undo", undo);
const hintButton = button("suggestions", () => { showsHints = !showsHints; draw(); });
const resignButton = button("resign", resign);
const suggestions = el("ol", { class: "suggestions", "aria-label": "suggestions" });
const moves = el("p", { class: "moves", "aria-label": "moves" });
const link = el("a", { rel: "noreferrer", target: "_blank" }, "this game on HexWorld");
const sizeChoice = choice("size", about.sizes.map((size) => [String(size), `${size} x ${size}`]), String(about.size));
const colorChoice = choice("you play", [["blue", "blue (first)"], ["red", "red"], ["both", "both"]], about.color);

function button(words, onclick) {
  return el("button", { type: "button", onclick }, words);
}

function choice(label, options, chosen) {
  const optionOf = ([value, words]) => el("option", { value, selected: value === chosen }, words);
  const select = el("select", {}, options.map(optionOf));
  return { select, element: el("label", {}, label, select) };
}

/** Returns whether the user plays this color. */
function plays(color) {
  return game.color === "both" || game.color === color;
}

/** Returns whether it is the user's turn. */
function isYours() {
  const { view } = game;
  return view !== null && view.winner === null && !game.resigned && !game.isThinking && plays(view.mover);
}

function play(move) {
  if (!isYours()) return;
  game.moves = [...game.moves, move];
  look();
}

function undo() {
  if (game.resigned) {
    game.resigned = null;
    draw();
    return;
  }
  if (game.isThinking) return;
  let length = game.moves.length - 1;
  while (length > 0 && !plays(moverAfter(length))) length--;
  if (length < 0 || !plays(moverAfter(length))) return;
  game.moves = game.moves.slice(0, length);
  look();
}

function moverAfter(length) {
  return length % 2 === 0 ? "blue" : "red";
}

function resign() {
  if (!isYours()) return;
  game.resigned = game.view.mover;
  draw();
}

function begin(size, color) {
  Object.assign(game, { size, color, moves: [], resigned: null, view: null, seed: Math.floor(Math.random() * 1e8) });
  look();
}

/** Fetches JSON. On failure, shows the error and retries until the server responds. */
async function fetchUntilAnswered(path) {
  for (;;)
    try {
      return (await fetchJson(path)).data;
    } catch (failure) {
      fill(page, el("p", { class: "notice bad" }, failure.message));
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
}

/** Fetches the view of the game, and plays the computer's reply if it is the computer's turn. */
async function look() {
  const mine = ++requested;
  game.isThinking = true;
  draw();
  try {
    for (;;) {
      const { data: view } = await fetchJson(`/api/game?size=${game.size}&moves=${game.moves.join(",")}&seed=${game.seed}`);
      if (mine !== requested) return; // Another game has started.
      game.view = view;
      if (view.winner !== null || plays(view.mover)) break;
      draw();
      game.moves = [...game.moves, view.reply];
    }
    fill(note).hidden = true;
  } catch (error) {
    if (mine !== requested) return;
    fill(note, error.message).hidden = false;
    const isBad = error.status === BAD_GAME;
    if (game.view) game.moves = [...game.view.moves];
    else if (isBad) game.moves = [];
    // On the user's turn, the next click sends a request. Otherwise, only this timer does.
    if (!isBad && !(game.view && plays(game.view.mover))) setTimeout(() => mine === requested && look(), AGAIN_MS);
  }
  game.isThinking = false;
  remember();
  draw();
}

function remember() {
  history.replaceState(null, "", `#${game.size}-${game.color},${game.moves.join(".")}`);
}

function draw() {
  const { view } = game;
  if (view === null) return;
  const hints = showsHints && isYours() ? view.suggestions : [];
  const focused = document.activeElement?.dataset?.cell;
  fill(boardPlace, drawBoard(view, { mayPlay: isYours(), hints, onCell: play }));
  if (focused) boardPlace.querySelector(`[data-cell="${focused}"]`)?.focus();
  fill(standing, wordsOf(view));
  const blue = Math.round(100 * (game.resigned ? Number(game.resigned === "red") : view.blue_wins));
  winBar.style.setProperty("width", `${blue}%`);
  meter.setAttribute("aria-valuenow", blue);
  fill(winWords, el("span", {}, `blue ${blue} %`), el("span", {}, `red ${100 - blue} %`));
  swapButton.disabled = !(isYours() && view.may_swap);
  undoButton.disabled = game.isThinking || !game.moves.some((_, place) => plays(moverAfter(place)));
  resignButton.disabled = !isYours();
  hintButton.setAttribute("aria-pressed", String(showsHints));
  const swaps = hints.length > 0 && view.reply === "swap" ? [el("li", {}, el("b", {}, "swap"))] : [];
  fill(suggestions, swaps, hints.map(suggestionOf));
  suggestions.hidden = hints.length === 0;
  fill(moves, view.moves.join(" ") || "no moves yet");
  link.href = view.record;
}

function wordsOf(view) {
  const winner = view.winner ?? (game.resigned ? { blue: "red", red: "blue" }[game.resigned] : null);
  if (winner) {
    const who = game.color === "both" ? " wins" : winner === game.color ? " wins: you" : ` wins: ${view.player}`;
    return [el("span", { class: winner }, winner), who, game.resigned ? " (resigned)" : ""];
  }
  if (!isYours()) return `${view.player} is thinking`;
  return [el("span", { class: view.mover }, view.mover), " to move", view.may_swap ? ", or swap" : ""];
}

function suggestionOf(one) {
  const percent = `${Math.round(100 * one.share)} %`;
  const share = el("div", { class: "share", style: { width: `${100 * one.share}%` } });
  return el("li", {}, el("b", {}, one.name), el("div", { class: "track" }, share), el("span", {}, percent));
}

/** Restores the game in the URL. Returns false if there is none. */
function recall() {
  const [, size, color, played] = location.hash.match(/^#(\d{1,2})-(blue|red|both),([a-z0-9.]*)$/) ?? [];
  if (!size || !about.sizes.includes(Number(size))) return false;
  Object.assign(game, { size: Number(size), color, moves: played ? played.split(".") : [] });
  sizeChoice.select.value = size;
  colorChoice.select.value = game.color;
  return true;
}

const bar = document.getElementById("bar");
const lead = `Against ${about.player}. Blue joins top and bottom, red left and right.`;
const buttons = el("div", { class: "buttons" }, swapButton, undoButton, hintButton, resignButton);
const newButton = button("new game", () => begin(Number(sizeChoice.select.value), colorChoice.select.value));
fill(bar, el("span", { class: "brand" }, "whet"), el("span", { class: "grow" }), themeButton(() => {}));
fill(
  page,
  el("header", { class: "hero" }, el("h1", {}, "Hex"), el("p", { class: "lead" }, lead)),
  el(
    "div",
    { class: "table" },
    boardPlace,
    el(
      "div",
      { class: "side" },
      el("div", { class: "card" }, standing, note, el("div", {}, meter, winWords)),
      el("div", { class: "card" }, buttons, suggestions),
      el("div", { class: "card new" }, sizeChoice.element, colorChoice.element, newButton),
      el("div", { class: "card" }, moves, el("p", { class: "caption" }, link)),
    ),
  ),
);
if (recall()) look();
else begin(about.size, about.color);
