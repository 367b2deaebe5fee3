// Draws the board as an SVG of hexagons, which support mouse, touch and keyboard.
const SVG = "http://www.w3.org/2000/svg";
const WIDE = Math.sqrt(3); // Width of a hexagon with side length 1 and a corner at the top.
const COLORS = ["", "blue", "red"];

function make(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Returns the center of a cell. */
function middle(row, column) {
  return [WIDE * (column + row / 2 + 0.5), 1.5 * row + 1];
}

export function nameOf(cell, size) {
  return String.fromCharCode(97 + (cell % size)) + (Math.floor(cell / size) + 1);
}

/** Returns the board of a view. If `mayPlay`, `onCell` is called with the name of a free cell that is selected. */
export function drawBoard(view, { mayPlay, hints, onCell }) {
  const { size } = view;
  const width = WIDE * (1.5 * size - 0.5);
  const height = 1.5 * size + 0.5;
  const margin = 1.15;
  const box = `${-margin} ${-margin} ${width + 2 * margin} ${height + 2 * margin}`;
  const board = make("svg", { class: "board", viewBox: box, role: "group", "aria-label": `board, ${size} by ${size}` });
  board.append(...edges(size), ...names(size));
  const chain = new Set(view.chain);
  view.cells.forEach((color, cell) => {
    const isFree = mayPlay && color === 0;
    const hint = hints.find((one) => one.cell === cell);
    const marks = { color, isFree, hint, isLast: cell === view.last, won: chain.has(cell) };
    board.append(drawCell(cell, size, marks, onCell));
  });
  return board;
}

function drawCell(cell, size, { color, isFree, hint, isLast, won }, onCell) {
  const [x, y] = middle(Math.floor(cell / size), cell % size);
  const name = nameOf(cell, size);
  const corners = [[0, -1], [WIDE / 2, -0.5], [WIDE / 2, 0.5], [0, 1], [-WIDE / 2, 0.5], [-WIDE / 2, -0.5]];
  const points = corners.map(([right, down]) => `${(x + right).toFixed(3)},${(y + down).toFixed(3)}`).join(" ");
  const group = make(
    "g",
    {
      class: `cell${isFree ? " free" : ""}`,
      "data-cell": name,
      role: isFree ? "button" : "img",
      tabindex: isFree ? "0" : null,
      "aria-label": color ? `${name} ${COLORS[color]}` : name,
    },
    make("polygon", { points }),
  );
  if (color) group.append(make("circle", { class: `stone ${COLORS[color]}`, cx: x, cy: y, r: 0.66 }));
  if (color === 2) group.append(make("circle", { class: "ring", cx: x, cy: y, r: 0.45 }));
  if (won) group.append(make("circle", { class: "won", cx: x, cy: y, r: 0.7 }));
  if (isLast) group.append(make("circle", { class: "last", cx: x, cy: y, r: 0.17 }));
  if (hint && !color) {
    const radius = 0.2 + 0.34 * Math.sqrt(hint.share);
    group.append(make("circle", { class: "good-move", cx: x, cy: y, r: radius.toFixed(3) }));
  }
  if (isFree) {
    group.addEventListener("click", () => onCell(name));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onCell(name);
    });
  }
  return group;
}

/** Returns the edges along the outer corners: blue's at the top and bottom, red's at the sides. */
function edges(size) {
  const last = size - 1;
  const each = Array.from({ length: size }, (_, place) => place);
  const along = (cells, corners) =>
    cells.flatMap(([row, column]) => {
      const [x, y] = middle(row, column);
      return corners.map(([right, down]) => `${(x + right).toFixed(3)},${(y + down).toFixed(3)}`);
    });
  const half = WIDE / 2;
  const above = [[-half, -0.5], [0, -1], [half, -0.5]];
  const below = [[-half, 0.5], [0, 1], [half, 0.5]];
  const lines = [
    ["red", along(each.map((row) => [row, 0]), [[-half, -0.5], [-half, 0.5]])],
    ["red", along(each.map((row) => [row, last]), [[half, -0.5], [half, 0.5]])],
    ["blue", along(each.map((column) => [0, column]), above)],
    ["blue", along(each.map((column) => [last, column]), below)],
  ];
  return lines.map(([color, points]) => make("polyline", { class: `edge ${color}`, points: points.join(" ") }));
}

function names(size) {
  const found = [];
  for (let place = 0; place < size; place++) {
    const [x, y] = middle(0, place);
    const [left, down] = middle(place, 0);
    found.push(nameAt("name", x - 0.35, y - 1.6, String.fromCharCode(97 + place)));
    found.push(nameAt("name row", left - 1.25, down, String(place + 1)));
  }
  return found;
}

function nameAt(kind, x, y, words) {
  return make("text", { class: kind, x, y, "aria-hidden": "true" }, words);
}
