// Builds elements. Text is always set as text, so nothing a model or an instance says can become markup.

export function element(tag, classes, ...children) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(label, action) {
  const node = element("button", "plain", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}
