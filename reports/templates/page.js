"use strict";
// A click on a column's name sorts its table: numbers by their value, texts by their letters.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const at = [...head.parentElement.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => {
      const cell = row.cells[at];
      return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
    };
    const compare = (a, b) =>
      typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    const rows = [...body.rows].map((row, number) => ({ row, number, key: key(row) }));
    rows.sort((a, b) => (up ? 1 : -1) * compare(a.key, b.key) || a.number - b.number);
    body.append(...rows.map((each) => each.row));
  });
}
// On paper everything is open.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
