// Builds elements. Text is always set as text, so nothing a model or an instance says can become markup.

export function element(tag, classes, ...children) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A piece of an SVG drawing, with its attributes and, where given, its text.
export function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

export function button(label, action) {
  const node = element("button", "plain", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}
