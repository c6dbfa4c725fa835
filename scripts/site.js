// Players: without this script each shows its first frame. Arrows of the keyboard step, too.
for (const player of document.querySelectorAll('.player')) {
  const frames = [...player.querySelectorAll('.frame')], nav = document.createElement('nav');
  let at = 0, timer = null;
  const button = (name, sign, act) => {
    const made = document.createElement('button');
    made.ariaLabel = made.title = name;
    made.textContent = sign;
    made.onclick = act;
    nav.append(made);
    return made;
  };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = '▶ play'; };
  const go = to => {
    at = Math.max(0, Math.min(frames.length - 1, to));
    frames.forEach((frame, number) => frame.classList.toggle('now', number === at));
    where.textContent = `${at + 1} of ${frames.length}`;
    if (at === frames.length - 1) stop();
  };
  button('one step back', '◀', () => { stop(); go(at - 1); });
  const play = button('play or pause', '▶ play', () => {
    if (timer) return stop();
    go(at === frames.length - 1 ? 0 : at);
    play.textContent = '❚❚ pause';
    timer = setInterval(() => go(at + 1), 1500);
  });
  button('one step on', '▶', () => { stop(); go(at + 1); });
  const where = nav.appendChild(document.createElement('span'));
  nav.onkeydown = event => go(at + ({ArrowRight: 1, ArrowLeft: -1}[event.key] ?? 0));
  player.prepend(nav);
  player.classList.add('live');
  go(0);
}
