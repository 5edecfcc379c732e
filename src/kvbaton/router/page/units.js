// Durations and sizes in words.

export const milliseconds = (seconds) => {
  const ms = seconds * 1000;
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${Math.round(ms).toLocaleString("en")} ms`;
};

export const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB"];
  let step = 0;
  while (count >= 1000 && step < units.length - 1) { count /= 1000; step += 1; }
  return `${step ? count.toFixed(1) : count} ${units[step]}`;
};
