// What assistive technology and people without a mouse stumble over; each item of the list is a fault.
(() => {
  const faults = [], ids = [...document.querySelectorAll("[id]")].map((item) => item.id);
  const name = (item) => (item.getAttribute("aria-label") || item.textContent || "").trim()
    || (item.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id)?.textContent).join("");
  if (new Set(ids).size !== ids.length) faults.push("an id is there twice");
  if (!document.documentElement.lang) faults.push("no language");
  if (!document.title) faults.push("no title");
  if (document.querySelectorAll("main").length !== 1 || document.querySelectorAll("h1").length !== 1) faults.push("main, h1");
  for (const item of document.querySelectorAll("a, button, [role=img], [role=region], section, svg, [tabindex]"))
    if (!name(item)) faults.push("no name: " + item.outerHTML.slice(0, 80));
  for (const item of document.querySelectorAll("th")) if (!item.scope) faults.push("a header without scope");
  for (const item of document.querySelectorAll("[tabindex]")) if (item.tabIndex > 0) faults.push("an order of its own");
  let level = 0;
  for (const item of document.querySelectorAll("h1, h2, h3")) {
    if (+item.tagName[1] > level + 1) faults.push("a heading is skipped before " + item.textContent);
    level = +item.tagName[1];
  }
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (text) => { const [r, g, b] = text.match(/[0-9.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const behind = (item) => { for (; item; item = item.parentElement) { const colour = getComputedStyle(item).backgroundColor;
    if (!/, 0\)$/.test(colour)) return colour; } return "rgb(255, 255, 255)"; };
  for (const item of document.querySelectorAll("h1, h2, h3, p, dt, dd, li, th, td, a, button, code, .badge, svg text")) {
    if (!item.textContent.trim()) continue;
    const style = getComputedStyle(item), front = light(item.closest("svg") ? style.fill : style.color);
    const back = light(behind(item)), contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(1)}: ${item.outerHTML.slice(0, 80)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is wider than the window");
  return faults;
})()
