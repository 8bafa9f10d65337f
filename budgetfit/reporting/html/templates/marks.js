// What a mark says, beside the pointer or the focused mark; Escape hides it.
(() => {
  const report = document.querySelector(".budgetfit");
  const says = document.createElement("div");
  says.className = "budgetfit-says";
  says.setAttribute("aria-hidden", "true"); // marks have the text as their label
  says.hidden = true;
  report.append(says);
  for (const title of report.querySelectorAll("svg .mark > title")) {
    title.parentNode.dataset.says = title.textContent;
    title.remove(); // or the browser shows its own as well
  }
  const show = (mark, x, y) => {
    says.textContent = mark.dataset.says;
    says.hidden = false;
    const { width, height } = says.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - width - 12);
    says.style.left = `${Math.max(12, left)}px`;
    says.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
  };
  const hide = () => { says.hidden = true; };
  const markOf = (event) => event.target.closest?.(".mark");
  report.addEventListener("pointermove", (event) => {
    const mark = markOf(event);
    if (mark) show(mark, event.clientX, event.clientY); else hide();
  });
  report.addEventListener("pointerleave", hide);
  report.addEventListener("focusin", (event) => {
    const mark = markOf(event);
    if (!mark?.matches(":focus-visible")) return;
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.bottom - 10);
  });
  report.addEventListener("focusout", hide);
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });
  // Printed with the tables, but for those of several pages.
  const mostRows = 40;
  const open = [];
  addEventListener("beforeprint", () => {
    for (const each of report.querySelectorAll("details:not([open])")) {
      if (each.querySelectorAll("tr").length <= mostRows) {
        each.open = true;
        open.push(each);
      }
    }
  });
  addEventListener("afterprint", () => {
    for (const each of open.splice(0)) each.open = false;
  });
})();
