// Runs before the first paint, so that no page flashes in the wrong theme.
(() => {
  const root = document.documentElement;
  const choice = () => {
    try { return localStorage.getItem("theme") || "auto"; } catch { return "auto"; }
  };
  const show = (value) => {
    if (value === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", value);
  };
  window.polymorphTheme = {
    choice,
    set(value) {
      try { localStorage.setItem("theme", value); } catch { /* private windows: the choice lasts for this page */ }
      show(value);
      document.dispatchEvent(new CustomEvent("themechange", { detail: value }));
    },
  };
  show(choice());
})();
