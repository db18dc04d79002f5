// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions from snapshots to what people and programs read.

pub mod doctor;
pub mod doctor_json;
pub mod footer;
pub mod histogram;
pub mod json;
pub mod late;
pub mod table;
