"use strict";
(() => {
  const WINDOW = 250; // rows laid out at once; a table of thousands would make every click wait for layout
  const value = (cell) => {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    return cell.classList.contains("num") ? NaN : cell.textContent;
  };
  // Missing values go last whichever the direction.
  const compare = (a, b, sign) => {
    const lostA = Number.isNaN(a), lostB = Number.isNaN(b);
    if (lostA || lostB) return lostA - lostB;
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const sortable = (table, sort) => {
    const heads = table.tHead.rows[0].cells;
    [...heads].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort((rows) => {
          const keyed = rows.map((row) => [value(row.cells[column]), row]);
          keyed.sort((x, y) => compare(x[0], y[0], down ? -1 : 1));
          return keyed.map((pair) => pair[1]);
        });
      });
    });
  };
  for (const table of document.querySelectorAll("table.data:not(#table-runs)")) {
    const body = table.tBodies[0];
    if (body.rows.length > 1) sortable(table, (order) => body.append(...order([...body.rows])));
  }
  const table = document.getElementById("table-runs");
  if (!table) return;
  const body = table.tBodies[0], filter = document.getElementById("filter");
  const count = document.getElementById("count"), all = document.getElementById("all");
  const rest = document.getElementById("table-runs-rest");
  let rows = [...body.rows, ...(rest ? rest.content.querySelectorAll("tr") : [])];
  const texts = new Map();
  let whole = false;
  const number = (n) => n.toLocaleString("en");
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && !texts.size) {
      for (const row of rows) texts.set(row, [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    }
    const fit = words.length ? rows.filter((row) => words.every((word) => texts.get(row).includes(word))) : rows;
    const shown = whole ? fit : fit.slice(0, WINDOW);
    body.replaceChildren(...shown);
    all.hidden = shown.length === fit.length;
    const cut = all.hidden ? "" : `, the first ${number(shown.length)} shown`;
    count.textContent = `${number(fit.length)} of ${number(rows.length)} runs${cut}`;
  };
  sortable(table, (order) => { rows = order(rows); show(); });
  filter.addEventListener("input", () => { whole = false; show(); });
  all.addEventListener("click", () => { whole = true; show(); });
  addEventListener("beforeprint", () => { whole = true; show(); });
  show();
})();
