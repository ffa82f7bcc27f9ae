// Adds to the page only what it can do without: sorting tables by a column, reading values off a chart.
'use strict';
const plain = text => Number(text.replace(/,/g, '').replace('\u2212', '-').replace('+', ''));
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement('button');
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') === 'descending' || (column === 0 && !head.hasAttribute('aria-sort'));
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const key = row => row.cells[column].textContent.trim();
      const compare = (a, b) => {
        const x = plain(key(a)), y = plain(key(b));
        if (column === 0 || (isNaN(x) && isNaN(y))) return key(a).localeCompare(key(b)) * (up ? 1 : -1);
        if (isNaN(x)) return 1;
        if (isNaN(y)) return -1;
        return up ? x - y : y - x;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
const short = value => value.toLocaleString('en', {maximumSignificantDigits: 3}).replace('-', '\u2212');
for (const svg of document.querySelectorAll('.chart svg')) {
  const [left, top, width, height] = svg.dataset.plot.split(' ').map(Number);
  const [x0, x1, y0, y1] = svg.dataset.range.split(' ').map(Number);
  const lines = [...svg.querySelectorAll('path[data-name]')].map(path =>
    [...path.getAttribute('d').matchAll(/([-\d.]+),([-\d.]+)/g)].map(match => [Number(match[1]), Number(match[2])]));
  if (!lines.length) continue;
  const cursor = svg.querySelector('.cursor'), axis = svg.querySelector('.axis');
  const shown = [...svg.parentNode.querySelectorAll('.legend b')], last = shown.map(b => b.textContent);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    if (at < left || at > left + width) return;
    lines.forEach((points, index) => {
      const y = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)[1];
      shown[index].textContent = short(y0 + (1 - (y - top) / height) * (y1 - y0));
    });
    cursor.setAttribute('x1', at); cursor.setAttribute('x2', at); cursor.classList.add('on');
    axis.textContent = 'step ' + Math.round(x0 + (at - left) / width * (x1 - x0));
  });
  svg.addEventListener('pointerleave', () => {
    cursor.classList.remove('on'); axis.textContent = 'step';
    shown.forEach((b, index) => { b.textContent = last[index]; });
  });
}
