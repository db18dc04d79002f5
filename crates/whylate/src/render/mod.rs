// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renderers of snapshots, late events and recordings: terminal text, JSON, the HTML report, and exports.

pub mod color;
pub mod export;
pub mod extension;
pub mod html;
pub mod json;
pub mod metrics;
pub mod text;
