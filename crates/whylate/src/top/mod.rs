// SPDX-License-Identifier: MIT OR Apache-2.0
//! The live screen. A feed yields moments, live or of a recording; `state` takes these and keys, and makes panels of
//! them; `draw` shows panels in so many columns and rows, and knows nothing else.

pub mod draw;
pub mod feed;
pub mod history;
pub mod keys;
pub mod panel;
pub mod state;
pub mod terminal;
mod view;
pub mod whose;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
