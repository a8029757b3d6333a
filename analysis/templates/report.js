"use strict";
(() => {
  const value = (cell) => {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    return cell.classList.contains("num") ? NaN : cell.textContent;
  };
  // Missing values go last whichever the direction.
  const compare = (a, b, sign) => {
    const lostA = typeof a === "number" && Number.isNaN(a), lostB = typeof b === "number" && Number.isNaN(b);
    if (lostA || lostB) return lostA - lostB;
    if (typeof a === "number") return sign * (a - b);
    return sign * a.localeCompare(b, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table.data")) {
    const body = table.tBodies[0];
    if (body.rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = [...body.rows].map((row) => [value(row.cells[column]), row]);
        keyed.sort((x, y) => compare(x[0], y[0], down ? -1 : 1));
        body.append(...keyed.map((pair) => pair[1]));
      });
    });
  }
  const filter = document.getElementById("filter");
  if (!filter) return;
  const rows = [...document.getElementById("table-runs").tBodies[0].rows];
  const count = document.getElementById("count");
  let texts = null;
  const apply = () => {
    texts ??= rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, place) => {
      const fits = words.every((word) => texts[place].includes(word));
      if (row.hidden === fits) row.hidden = !fits;
      shown += fits;
    });
    count.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} runs`;
  };
  filter.addEventListener("input", apply);
  apply();
})();
