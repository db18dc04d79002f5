// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests whylate on other kernels than the running one, each in a virtual machine: the kernel tests of the sources,
//! which compare with raw trace lines of the same run, and the static program.

use anyhow::Result;

#[path = "matrix/kernels.rs"]
mod kernels;
#[path = "matrix/machine.rs"]
mod machine;
#[path = "matrix/parts.rs"]
mod parts;
#[path = "matrix/record.rs"]
mod record;

use kernels::{ARM64_6_12, CLOUD_6_1, CLOUD_6_12, Expected, RT_6_12, TRACERS_6_12};

fn short(expected: &'static Expected) -> Result<()> {
    machine::try_all(expected.kernel, "short", parts::short(expected))
}

fn whole(expected: &'static Expected) -> Result<()> {
    machine::try_all(expected.kernel, "whole", parts::whole(expected))
}

#[test]
fn short_6_1_cloud() -> Result<()> {
    short(&CLOUD_6_1)
}

#[test]
fn short_6_12_cloud() -> Result<()> {
    short(&CLOUD_6_12)
}

#[test]
fn short_6_12_rt() -> Result<()> {
    short(&RT_6_12)
}

#[test]
fn short_6_12_tracers() -> Result<()> {
    short(&TRACERS_6_12)
}

fn waits(expected: &'static Expected) -> Result<()> {
    machine::try_all(expected.kernel, "waits", parts::waits(expected))
}

#[test]
fn whole_6_1_cloud() -> Result<()> {
    whole(&CLOUD_6_1)
}

#[test]
fn whole_6_12_cloud() -> Result<()> {
    whole(&CLOUD_6_12)
}

#[test]
fn whole_6_12_rt() -> Result<()> {
    whole(&RT_6_12)
}

#[test]
fn whole_6_12_tracers() -> Result<()> {
    whole(&TRACERS_6_12)
}

#[test]
fn whole_waits_6_1_cloud() -> Result<()> {
    waits(&CLOUD_6_1)
}

#[test]
fn whole_waits_6_12_cloud() -> Result<()> {
    waits(&CLOUD_6_12)
}

#[test]
fn whole_waits_6_12_rt() -> Result<()> {
    waits(&RT_6_12)
}

#[test]
fn whole_waits_6_12_tracers() -> Result<()> {
    waits(&TRACERS_6_12)
}

fn disks(expected: &'static Expected) -> Result<()> {
    machine::try_all(expected.kernel, "disks", parts::disks(expected))
}

fn sqpoll(expected: &'static Expected) -> Result<()> {
    machine::try_all(expected.kernel, "sqpoll", parts::sqpoll(expected))
}

#[test]
fn whole_disks_6_1_cloud() -> Result<()> {
    disks(&CLOUD_6_1)
}

#[test]
fn whole_sqpoll_6_1_cloud() -> Result<()> {
    sqpoll(&CLOUD_6_1)
}

#[test]
fn whole_disks_6_12_cloud() -> Result<()> {
    disks(&CLOUD_6_12)
}

#[test]
fn whole_sqpoll_6_12_cloud() -> Result<()> {
    sqpoll(&CLOUD_6_12)
}

#[test]
fn whole_disks_6_12_rt() -> Result<()> {
    disks(&RT_6_12)
}

#[test]
fn whole_disks_6_12_tracers() -> Result<()> {
    disks(&TRACERS_6_12)
}

/// Separate, as those above and below, so that no landing has to wait for all parts of a kernel.
#[test]
fn whole_tracer_6_12_rt() -> Result<()> {
    machine::try_all(RT_6_12.kernel, "tracer", parts::tracer(&RT_6_12))
}

#[test]
fn whole_tracer_6_12_tracers() -> Result<()> {
    machine::try_all(TRACERS_6_12.kernel, "tracer", parts::tracer(&TRACERS_6_12))
}

/// One of its two CPUs is isolated at boot.
#[test]
fn whole_isolated_6_12_cloud() -> Result<()> {
    let words = Some("isolcpus=1 nohz_full=1");
    machine::try_all_booted_with(CLOUD_6_12.kernel, "isolated", words, parts::isolated())
}

#[test]
fn whole_torture_6_12_cloud() -> Result<()> {
    machine::try_all(CLOUD_6_12.kernel, "torture", parts::torture())
}

#[test]
fn whole_6_12_arm64() -> Result<()> {
    machine::try_all(ARM64_6_12.kernel, "whole", parts::of_program(&ARM64_6_12))
}
