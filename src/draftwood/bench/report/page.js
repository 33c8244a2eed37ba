"use strict";
// Optional: hides methods and sorts tables.
(() => {
  const hidden = new Set();
  const show = () => {
    for (const node of document.querySelectorAll(".m")) node.classList.toggle("off", hidden.has(node.dataset.m));
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.parentNode.dataset.m)));
    }
  };
  for (const item of document.querySelectorAll(".legend li[data-m]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Show or hide";
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => {
      const name = item.dataset.m;
      if (!hidden.delete(name)) hidden.add(name);
      show();
    });
  }
  show();

  const sortValue = (cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value));
  const compare = (a, b, sign) => {
    const [x, y] = [sortValue(a), sortValue(b)];
    if (Number.isNaN(x) && Number.isNaN(y)) return sign * a.textContent.localeCompare(b.textContent);
    if (Number.isNaN(x)) return 1; // unknown values come last in both directions
    if (Number.isNaN(y)) return -1;
    return sign * (x - y);
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === null ? head.classList.contains("n") : head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((a, b) => compare(a.cells[place], b.cells[place], down ? -1 : 1));
        body.append(...rows);
      });
    });
  }
})();
