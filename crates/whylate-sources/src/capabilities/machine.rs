// SPDX-License-Identifier: MIT OR Apache-2.0
//! Version of the kernel, and the machine it runs on, from the text of its files.

use super::{Fact, read_line, words};
use crate::kernel::cpu_choice::Choice;
use crate::kernel::cpus::{self, Signs};
use crate::kernel::percpu::PreemptCount;

const CPUS: &str = "/sys/devices/system/cpu";
const CLOCK_SOURCES: &str = "/sys/devices/system/clocksource/clocksource0";
const SCHED_PREEMPT: &str = "/sys/kernel/debug/sched/preempt";

/// Version of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Output of `uname -r`.
    pub release: Option<String>,
    /// Architecture, as `uname -m` prints it.
    pub arch: String,
    /// Preemption model.
    pub preemption: String,
}

/// Clock source of timestamps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockSource {
    /// Current clock source.
    pub current: Option<String>,
    /// Available clock sources, best first.
    pub available: Vec<String>,
}

impl ClockSource {
    /// Tests for a device that takes a microsecond or more to read, which each timestamp then costs.
    pub fn is_slow(&self) -> bool {
        self.current.as_deref().is_some_and(|name| matches!(name, "hpet" | "acpi_pm" | "pit" | "refined-jiffies"))
    }
}

/// A set of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList {
    /// CPUs in the kernel's list format, `0-3,8`; empty for none.
    pub list: String,
    /// Number of CPUs; `None` if the list is invalid.
    pub count: Option<u64>,
}

/// Sets of CPUs; `None` if the kernel does not report one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// Online CPUs.
    pub online: Option<CpuList>,
    /// CPUs that may ever be online.
    pub possible: Option<CpuList>,
    /// Isolated from other threads by `isolcpus=` or a cpuset partition.
    pub isolated: Option<CpuList>,
    /// CPUs without a tick while one thread runs.
    pub nohz_full: Option<CpuList>,
    /// Measured with whylate's own threads and timers, if none are requested.
    pub measured: Option<CpuList>,
    /// The excluded CPUs and why; `None` if there are none.
    pub left_out: Option<String>,
}

pub(super) fn probe_kernel() -> Kernel {
    let version = read_line("/proc/sys/kernel/version");
    let mode = read_line(SCHED_PREEMPT);
    Kernel {
        release: read_line("/proc/sys/kernel/osrelease").ok(),
        // The file exists since 6.1.
        arch: read_line("/proc/sys/kernel/arch").unwrap_or_else(|_| std::env::consts::ARCH.to_owned()),
        preemption: preemption(&mode, version.as_deref().ok()),
    }
}

/// Parses the list of modes with the current one in parentheses, or else the version, as printed by `uname -v`.
fn preemption(modes: &Result<String, String>, version: Option<&str>) -> String {
    let in_force = modes.as_ref().ok().and_then(|modes| Some(modes.split_once('(')?.1.split_once(')')?.0));
    let built = version.and_then(|version| version.split_whitespace().find(|word| word.starts_with("PREEMPT")));
    match (built, in_force, version) {
        // A PREEMPT_RT kernel's list has modes too, but PREEMPT_RT is what matters.
        (Some("PREEMPT_RT"), Some(mode), _) => format!("PREEMPT_RT, {mode}"),
        (Some(built), Some(mode), _) => format!("{built}, {mode} in force"),
        (None, Some(mode), _) => format!("{mode} in force"),
        (Some("PREEMPT_DYNAMIC"), None, _) => match modes {
            Ok(_) => "PREEMPT_DYNAMIC".to_owned(),
            Err(why) if why.ends_with("is absent") => {
                "PREEMPT_DYNAMIC (to see the mode, as root: mount -t debugfs debugfs /sys/kernel/debug)".to_owned()
            }
            Err(why) => format!("PREEMPT_DYNAMIC (mode unknown: {why})"),
        },
        (Some(built), None, _) => built.to_owned(),
        (None, None, Some(_)) => "none or voluntary".to_owned(),
        (None, None, None) => "preemption unknown (/proc is not readable)".to_owned(),
    }
}

pub(super) fn probe_clock_source() -> ClockSource {
    let read = |name: &str| read_line(&format!("{CLOCK_SOURCES}/{name}"));
    ClockSource {
        current: read("current_clocksource").ok(),
        available: read("available_clocksource").map(|line| words(&line)).unwrap_or_default(),
    }
}

pub(super) fn probe_cpus(choice: Option<&Choice>) -> Cpus {
    let read = |name: &str| read_line(&format!("{CPUS}/{name}")).ok().map(|line| cpu_list(&line));
    Cpus {
        online: read("online"),
        possible: read("possible"),
        isolated: read("isolated"),
        nohz_full: read("nohz_full"),
        measured: choice.map(|choice| cpu_list(&cpus::list(&choice.measured))),
        left_out: choice.and_then(Choice::remark),
    }
}

fn cpu_list(text: &str) -> CpuList {
    // Some kernels print the null pointer of an empty nohz_full like this.
    let list = if text.trim() == "(null)" { "" } else { text.trim() };
    CpuList { list: list.to_owned(), count: count_cpus(list) }
}

fn count_cpus(list: &str) -> Option<u64> {
    if list.is_empty() {
        return Some(0);
    }
    list.split(',').try_fold(0u64, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

pub(super) fn probe_hypervisor() -> Fact {
    let found = hypervisor(&Signs::here());
    let limitations = [cpus::unseen_interrupts(), PreemptCount::here().limitation()];
    let detail =
        limitations.into_iter().flatten().fold(found.detail, |detail, limitation| format!("{detail}; {limitation}"));
    Fact { detail, ..found }
}

fn hypervisor(signs: &Signs) -> Fact {
    let mut detail: Vec<&str> = signs.name().into_iter().collect();
    if !signs.firmware.is_empty() && !detail.contains(&signs.firmware.as_str()) {
        detail.push(&signs.firmware);
    }
    match &signs.cpus {
        _ if signs.is_flagged() || signs.name().is_some() => Fact::yes(detail.join(", ")),
        Some(_) => Fact::no("none found"),
        None => Fact::unknown("/proc/cpuinfo is not readable"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_current_preemption_mode() {
        let dynamic = Some("#1 SMP PREEMPT_DYNAMIC Debian 6.12.1");
        let modes = |text: &str| Ok(text.to_owned());
        let absent = || Err(format!("{SCHED_PREEMPT} is absent"));
        assert_eq!(preemption(&modes("none voluntary (full) lazy"), dynamic), "PREEMPT_DYNAMIC, full in force");
        assert_eq!(preemption(&modes("none"), dynamic), "PREEMPT_DYNAMIC");
        assert!(preemption(&absent(), dynamic).contains("mount -t debugfs"));
        assert_eq!(
            preemption(&Err("it is closed".to_owned()), dynamic),
            "PREEMPT_DYNAMIC (mode unknown: it is closed)"
        );
        assert_eq!(preemption(&modes("(full) lazy"), Some("#1 SMP PREEMPT_RT")), "PREEMPT_RT, full");
        assert_eq!(preemption(&absent(), Some("#1 SMP PREEMPT_RT")), "PREEMPT_RT");
        assert_eq!(preemption(&absent(), Some("#1 SMP Mon")), "none or voluntary");
        assert!(preemption(&absent(), None).contains("unknown"));
    }

    #[test]
    fn counts_cpus() {
        for (list, count) in [
            ("0", Some(1)),
            ("0-3,8", Some(5)),
            ("", Some(0)),
            ("(null)", Some(0)),
            ("3-1", None),
            ("a", None),
            ("0-18446744073709551615", None),
        ] {
            assert_eq!(cpu_list(list).count, count, "{list}");
        }
    }

    #[test]
    fn finds_hypervisor_by_flag_and_name() {
        let fact_of = |cpus: Option<&str>, xen: Option<&str>, firmware: &str, clock| {
            let (cpus, firmware) = (cpus.map(str::to_owned), firmware.to_owned());
            hypervisor(&Signs { cpus, hypervisor: xen.map(str::to_owned), firmware, clock })
        };
        let flagged = Some("processor : 0\nflags\t\t: fpu hypervisor lm\n");
        assert_eq!(fact_of(flagged, None, "", Some("KVM")), Fact::yes("KVM"));
        assert_eq!(fact_of(flagged, None, "QEMU Standard PC", None), Fact::yes("QEMU Standard PC"));
        assert_eq!(fact_of(flagged, None, "Amazon EC2 m5.large", None), Fact::yes("Amazon EC2 m5.large"));
        assert_eq!(fact_of(Some("flags : fpu"), None, "Dell", None), Fact::no("none found"));
        assert_eq!(fact_of(Some("flags : fpu"), Some("xen"), "", None), Fact::yes("xen"));
        assert_eq!(fact_of(None, None, "", None), Fact::unknown("/proc/cpuinfo is not readable"));
        // The model's name is not a flag.
        assert_eq!(fact_of(Some("model name : hypervisor\n"), None, "", None), Fact::no("none found"));
    }

    #[test]
    fn devices_are_slow_clock_sources() {
        let of = |name: &str| ClockSource { current: Some(name.to_owned()), available: Vec::new() };
        assert!(of("hpet").is_slow());
        assert!(!of("tsc").is_slow());
    }

    proptest! {
        #[test]
        fn never_panics_on_any_text(a in ".*", b in ".*", list in "[0-9,-]{0,30}") {
            preemption(&Ok(a.clone()), Some(&b));
            preemption(&Err(b.clone()), Some(&a));
            cpu_list(&a);
            cpu_list(&list);
            let signs = Signs { cpus: Some(format!("flags{a}")), firmware: b.clone(), ..Signs::default() };
            hypervisor(&Signs { hypervisor: Some(b), ..signs.clone() });
            hypervisor(&signs);
        }
    }
}
