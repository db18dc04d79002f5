// SPDX-License-Identifier: MIT OR Apache-2.0
//! Color: bold red for what is late, and for nothing else.

use std::borrow::Cow;
use std::io::{self, IsTerminal as _};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;

/// When to color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// Whether standard output is colored: one for the process, as standard output is.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Turns color on or off.
pub fn set(when: When) {
    let is_on = match when {
        When::Auto => is_wanted(),
        When::Always => true,
        When::Never => false,
    };
    IS_ON.store(is_on, Ordering::Relaxed);
}

/// Follows no-color.org.
fn is_wanted() -> bool {
    let is_asked_not_to = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    io::stdout().is_terminal() && !is_asked_not_to && !is_dumb
}

pub fn is_on() -> bool {
    #[cfg(test)]
    if tests::IS_ON_HERE.get() {
        return true;
    }
    IS_ON.load(Ordering::Relaxed)
}

/// Returns text that is shown as late.
pub fn late(text: &str) -> Cow<'_, str> {
    if is_on() { format!("\x1b[1;31m{text}\x1b[m").into() } else { text.into() }
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Whether the output of this thread, which is that of one test, is colored.
        pub(super) static IS_ON_HERE: Cell<bool> = const { Cell::new(false) };
    }

    /// Returns what is colored in the text that `write` returns.
    pub fn colored(write: impl FnOnce() -> String) -> Vec<String> {
        IS_ON_HERE.set(true);
        let text = write();
        IS_ON_HERE.set(false);
        let parts = text.split("\x1b[1;31m").skip(1);
        parts.map(|part| part.split("\x1b[m").next().unwrap_or_default().to_owned()).collect()
    }
}
