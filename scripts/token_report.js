// Shows a token's `title` at once and in one place; without this script the browser shows it after a moment.
const tip = document.getElementById("tip");

function show(token) {
  if (token.title) {
    token.dataset.tip = token.title;
    token.removeAttribute("title");
  }
  tip.textContent = token.dataset.tip;
  tip.hidden = false;
  const at = token.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = at.bottom + 6;
  const left = Math.min(at.left, window.innerWidth - size.width - 8);
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (below + size.height > window.innerHeight ? at.top - size.height - 6 : below) + "px";
}

document.addEventListener("mouseover", (event) => {
  const token = event.target.closest("article p span");
  if (token) show(token);
  else tip.hidden = true;
});
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
