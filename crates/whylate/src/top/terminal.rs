// SPDX-License-Identifier: MIT OR Apache-2.0
//! Terminal: raw mode while the screen is shown, restored on every exit path.
//!
//! Keys are read and parsed here, as crossterm's reader retries on a closed terminal and burns a CPU
//! (crossterm-rs/crossterm#793).

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal as _, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::queue;
use ratatui::crossterm::terminal::{
    BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, kill_current_process_group};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGWINCH};

use super::draw::draw;
use super::feed::PANIC;
use super::keys::{Key, Keys};
use super::state::State;

/// Time for which the start of an escape sequence waits for the rest.
const REST_OF_KEY: Duration = Duration::from_millis(50);

/// Input terminal, its saved settings, and the output terminal; `None` when nothing has to be restored.
static BEFORE: Mutex<Option<(File, Termios, File)>> = Mutex::new(None);

/// Restores the terminal, if it was changed. Errors do not matter: it may have been closed.
fn restore() {
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((input, termios, mut output)) = before.take() {
        let _ = tcsetattr(&input, OptionalActions::Now, &termios);
        let _ = queue!(output, EndSynchronizedUpdate, Show, LeaveAlternateScreen);
        let _ = output.flush();
    }
}

/// Event to react to.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Keys(Vec<Key>),
    /// The feed has messages.
    Fed,
    /// The window was resized or must be redrawn.
    Resized,
    /// The process was continued after a stop.
    Continued,
    /// The deadline passed.
    Time,
    /// A signal asks us to exit, or the terminal was closed.
    End,
}

/// The screen, while it is shown.
pub struct Screen {
    /// Never dropped: its destructor prints an error if it cannot show the cursor on a closed terminal.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<BufWriter<File>>>>,
    input: File,
    keys: Keys,
    /// Deadline for the rest of an escape sequence.
    rest_of_key: Option<Instant>,
    ends: UnixStream,
    resizes: UnixStream,
    continues: UnixStream,
}

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// Fails if there is no terminal.
    pub fn open() -> anyhow::Result<Self> {
        let ends = [SIGINT, SIGTERM, SIGHUP];
        // A writer blocked by its terminal does not see the first signal; it finds the flag unset.
        for signal in ends {
            let is_second = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&is_second))
                .and_then(|_| signal_hook::flag::register(signal, is_second))
                .context("cannot watch for signals")?;
        }
        let (ends, resizes, continues) =
            (signal_socket(&ends)?, signal_socket(&[SIGWINCH])?, signal_socket(&[SIGCONT])?);
        let (output, input) = (output()?, input()?);
        restore_at_panic();
        show_on(&input, &output)?;
        let terminal = Terminal::new(CrosstermBackend::new(BufWriter::new(output))).context("cannot draw")?;
        let terminal = ManuallyDrop::new(terminal);
        Ok(Screen { terminal, input, keys: Keys::default(), rest_of_key: None, ends, resizes, continues })
    }

    /// Returns the size in columns and rows.
    ///
    /// # Errors
    /// Fails if the terminal was closed.
    pub fn size(&self) -> io::Result<(usize, usize)> {
        let size = rustix::termios::tcgetwinsize(&self.input)?;
        Ok((usize::from(size.ws_col), usize::from(size.ws_row)))
    }

    /// Draws what changed since the last frame.
    ///
    /// # Errors
    /// Fails if the terminal was closed.
    pub fn draw(&mut self, state: &State) -> io::Result<()> {
        queue!(self.terminal.backend_mut(), BeginSynchronizedUpdate)?;
        self.terminal.draw(|frame| draw(frame, state))?;
        queue!(self.terminal.backend_mut(), EndSynchronizedUpdate)?;
        ratatui::backend::Backend::flush(self.terminal.backend_mut())
    }

    /// Forces a full redraw of the next frame.
    ///
    /// # Errors
    /// Fails if the terminal was closed.
    pub fn forget(&mut self) -> io::Result<()> {
        // `Terminal::clear` would ask the terminal for its cursor position and wait for the answer.
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// Fails if poll(2) fails.
    pub fn next(&mut self, fed: Option<&UnixStream>, until: Option<Instant>) -> io::Result<Event> {
        loop {
            let next = until.into_iter().chain(self.rest_of_key).min();
            let timeout = next.map(|next| next.saturating_duration_since(Instant::now()));
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            // The socket of an ended feed is always readable. The input, which is polled anyway, replaces it.
            let of_feed = fed.map_or(self.input.as_fd(), |fed| fed.as_fd());
            let mut watched = [
                PollFd::new(&self.ends, PollFlags::IN),
                PollFd::new(&self.input, PollFlags::IN),
                PollFd::new(&self.resizes, PollFlags::IN),
                PollFd::new(&self.continues, PollFlags::IN),
                PollFd::from_borrowed_fd(of_feed, PollFlags::IN),
            ];
            match poll(&mut watched, timeout.as_ref()) {
                Ok(0) if self.rest_of_key.is_some_and(|at| at <= Instant::now()) => {
                    self.rest_of_key = None;
                    return Ok(Event::Keys(self.keys.end().into_iter().collect()));
                }
                Ok(0) => return Ok(Event::Time),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let [ends, input, resizes, continues, feed] = watched.map(|of| of.revents());
            let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
            if !ends.is_empty() || input.intersects(gone) {
                return Ok(Event::End);
            }
            if !input.is_empty() {
                let mut bytes = [0; 1024];
                let length = match rustix::io::read(&self.input, &mut bytes) {
                    Ok(length) => length,
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(_) => 0,
                };
                // A terminal has no end of file unless it was closed.
                if length == 0 {
                    return Ok(Event::End);
                }
                let keys = self.keys.take(&bytes[..length]);
                self.rest_of_key = self.keys.has_part().then(|| Instant::now() + REST_OF_KEY);
                return Ok(Event::Keys(keys));
            }
            for (stream, events, event) in
                [(&self.continues, continues, Event::Continued), (&self.resizes, resizes, Event::Resized)]
            {
                if !events.is_empty() {
                    drain(stream);
                    return Ok(event);
                }
            }
            if let Some(fed) = fed.filter(|_| !feed.is_empty()) {
                drain(fed);
                return Ok(Event::Fed);
            }
        }
    }

    /// Returns the terminal to the shell until this process is continued.
    ///
    /// # Errors
    /// Fails if the terminal was closed.
    pub fn suspend(&mut self) -> anyhow::Result<()> {
        restore();
        // Stops the whole process group, as the terminal does: a shell script that runs whylate is stopped too.
        kill_current_process_group(Signal::TSTP).context("cannot suspend")?;
        self.resume()
    }

    /// Takes over the terminal again after the shell used it.
    ///
    /// # Errors
    /// Fails if the terminal was closed.
    pub fn resume(&mut self) -> anyhow::Result<()> {
        show_on(&self.input, &output()?)?;
        self.forget().context("cannot draw")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Opens the terminal that the screen is drawn on.
fn output() -> anyhow::Result<File> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        anyhow::bail!("standard output is not a terminal (run `whylate` for text, or `whylate --json`)");
    }
    Ok(File::from(stdout.as_fd().try_clone_to_owned().context("cannot use the terminal")?))
}

/// Opens the terminal that keys come from, also if standard input is something else.
fn input() -> anyhow::Result<File> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Ok(File::from(stdin.as_fd().try_clone_to_owned().context("cannot use the terminal")?));
    }
    File::open("/dev/tty").context("cannot read keys: stdin is not a terminal (do not redirect it)")
}

fn show_on(input: &File, output: &File) -> anyhow::Result<()> {
    let termios = tcgetattr(input).context("cannot use the terminal")?;
    let mut raw = termios.clone();
    raw.make_raw();
    let mut file = output.try_clone().context("cannot use the terminal")?;
    let before = (input.try_clone()?, termios, output.try_clone()?);
    // On a second call the terminal is already raw: keeps the settings saved by the first one.
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(before);
    tcsetattr(input, OptionalActions::Now, &raw).context("cannot use the terminal")?;
    queue!(file, EnterAlternateScreen, Hide).context("cannot draw")?;
    Ok(file.flush()?)
}

/// Restores the terminal before a panic on the main thread prints its message.
fn restore_at_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if thread::current().name() == Some("main") {
                restore();
                before(panic);
            } else {
                // Another thread's panic is reported on the screen, which goes on.
                *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic.to_string());
            }
        }));
    });
}

/// Returns a socket that is readable when one of these signals arrives.
fn signal_socket(signals: &[i32]) -> anyhow::Result<UnixStream> {
    let (receiver, sender) = UnixStream::pair().context("cannot watch for signals")?;
    receiver.set_nonblocking(true)?;
    for &signal in signals {
        signal_hook::low_level::pipe::register(signal, sender.try_clone()?).context("cannot watch for signals")?;
    }
    Ok(receiver)
}

fn drain(stream: &UnixStream) {
    let mut bytes = [0; 256];
    while rustix::io::read(stream, &mut bytes).is_ok_and(|length| length == bytes.len()) {}
}
