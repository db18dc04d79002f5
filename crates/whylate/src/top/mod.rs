// SPDX-License-Identifier: MIT OR Apache-2.0
//! Live screen. A feed sends ticks, live or from a recording; `state` takes ticks and keys and builds panels; `draw`
//! renders panels for a screen size.

pub mod draw;
pub mod feed;
pub mod history;
pub mod keys;
pub mod panel;
pub mod program_filter;
pub mod state;
pub mod terminal;
mod view;
pub mod view_kind;
pub mod window;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
