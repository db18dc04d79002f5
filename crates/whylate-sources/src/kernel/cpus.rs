// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPUs of this machine, and their kind.

use std::io;

use anyhow::Context as _;

use crate::kernel::error::AttachError;
use crate::kernel::percpu::PreemptCount;

/// Returns the highest possible CPU number; there may be gaps below it.
///
/// # Errors
/// Fails if the kernel's list cannot be read.
pub fn highest_possible() -> io::Result<u32> {
    read("possible")?.into_iter().max().ok_or_else(|| io::Error::other("the kernel names no CPU"))
}

/// Returns the online CPUs.
///
/// # Errors
/// Fails if the kernel's list cannot be read.
pub fn online() -> io::Result<Vec<u32>> {
    read("online")
}

/// Refuses CPUs that are not online.
///
/// # Errors
/// Fails if the kernel does not list its CPUs, or one of these is not online.
pub fn all_online(asked: &[u32]) -> Result<(), AttachError> {
    if asked.is_empty() {
        return Ok(());
    }
    refuse_offline(asked, &online().context("cannot list the online CPUs")?)
}

fn refuse_offline(asked: &[u32], online: &[u32]) -> Result<(), AttachError> {
    let message = |cpu| format!("CPU {cpu} is not online: choose from {}", list(online));
    match asked.iter().find(|cpu| !online.contains(cpu)) {
        Some(cpu) => Err(AttachError::Contradiction(message(cpu))),
        None => Ok(()),
    }
}

/// Parses a thread's `status` (proc_pid_status(5)).
pub(crate) fn allowed_of(status: &str) -> Option<Vec<u32>> {
    numbers(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
}

/// Returns the steal time of a CPU since boot, rounded to [`stolen_tick_ns`] (proc_stat(5)); 0 if the kernel does not
/// count it.
///
/// # Errors
/// Fails if the kernel's counters cannot be read.
pub fn stolen_ns(cpu: u32) -> io::Result<u64> {
    Ok(stolen_ticks(&std::fs::read_to_string("/proc/stat")?, cpu).unwrap_or(0).saturating_mul(stolen_tick_ns()))
}

/// Returns the granularity of the kernel's steal time.
pub fn stolen_tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

/// Parses the eighth counter of a CPU's line.
fn stolen_ticks(stat: &str, cpu: u32) -> Option<u64> {
    let name = format!("cpu{cpu}");
    let mut words = stat.lines().map(str::split_ascii_whitespace).find(|words| words.clone().next() == Some(&name))?;
    words.nth(8)?.parse().ok()
}

/// Reads one of the kernel's lists of CPUs.
pub(crate) fn read(which: &str) -> io::Result<Vec<u32>> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{which}"))?;
    numbers(&text).ok_or_else(|| io::Error::other(format!("the kernel's list of {which} CPUs makes no sense")))
}

/// Parses the kernel's CPU list format, `0-3,8`; `None` if it is invalid.
pub fn numbers(list: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // No kernel has more CPUs than this, and none lists one twice.
        if last < first || last > 0xffff || cpus.len() > 0xffff {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Formats ascending CPU numbers as the kernel does, `0-3,8`.
pub fn list(cpus: &[u32]) -> String {
    let ranges = cpus.chunk_by(|one, next| one + 1 == *next);
    let named = ranges.filter_map(|range| match (range.first()?, range.last()?) {
        (first, last) if first == last => Some(first.to_string()),
        (first, last) => Some(format!("{first}-{last}")),
    });
    named.collect::<Vec<_>>().join(",")
}

/// Returns the limitation on machines with interrupts that have no tracepoints.
pub(crate) fn unseen_interrupts() -> Option<&'static str> {
    let device = std::fs::read_to_string("/sys/devices/system/clockevents/clockevent0/current_device").ok()?;
    unseen_interrupts_of(device.trim(), PreemptCount::here() != PreemptCount::Unknown)
}

/// Decides by the name of a clock event device. `sysvec_hyperv_stimer0` and `sysvec_hyperv_callback`
/// (arch/x86/kernel/cpu/mshyperv.c) have no tracepoints. The preemption count shows programs that there is an
/// interrupt.
fn unseen_interrupts_of(device: &str, has_preempt_count: bool) -> Option<&'static str> {
    const WITH_COUNT: &str = "the kernel has no tracepoints for Hyper-V's timer and VMBus interrupts: their time counts as that \
                              of what they interrupt, threads that they wake have an unseen waker, and only late timers show \
                              interrupts that are off (not tried on such a machine)";
    const WITHOUT: &str = "the kernel has no tracepoints for Hyper-V's timer and VMBus interrupts: their time counts as that of \
                           what they interrupt, and only late timers show interrupts that are off (not tried on such a \
                           machine)";
    device.starts_with("Hyper-V").then_some(if has_preempt_count { WITH_COUNT } else { WITHOUT })
}

/// Kind of machine that the kernel runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Bare metal.
    Bare,
    /// A hypervisor, which may preempt a vCPU.
    Virtual,
    /// QEMU without KVM, which emulates each instruction: a CPU may stop for milliseconds between any two of them.
    Emulated,
}

/// Evidence of the kind of a machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signs {
    /// `/proc/cpuinfo`; `None` where it cannot be read.
    pub cpus: Option<String>,
    /// `/sys/hypervisor/type`, or the `hypervisor` node's `compatible` in the device tree.
    pub hypervisor: Option<String>,
    /// Vendor and product of the firmware (SMBIOS), or the model in the device tree.
    pub firmware: String,
    /// Hypervisor by an available clock source.
    pub clock: Option<&'static str>,
}

/// Vendors and products of firmware that is never on bare metal. EC2 sells bare metal as `NAME.metal`.
const VIRTUAL_FIRMWARE: [&str; 9] = [
    "QEMU",
    "KVM",
    "VMware",
    "VirtualBox",
    "Bochs",
    "Virtual Machine",
    "Google Compute Engine",
    "linux,dummy-virt",
    "Apple Virtualization",
];

impl Signs {
    /// Reads the evidence on this machine.
    pub(crate) fn here() -> Self {
        let read = |path: &str| {
            let text = String::from_utf8_lossy(&std::fs::read(path).ok()?).into_owned();
            Some(text.trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()).filter(|text| !text.is_empty())
        };
        let firmware = ["class/dmi/id/sys_vendor", "class/dmi/id/product_name", "firmware/devicetree/base/model"];
        let firmware: Vec<String> = firmware.iter().filter_map(|name| read(&format!("/sys/{name}"))).collect();
        let clocks = read("/sys/devices/system/clocksource/clocksource0/available_clocksource").unwrap_or_default();
        let clock = clocks.split_whitespace().find_map(|name| match name {
            "kvm-clock" => Some("KVM"),
            "xen" => Some("Xen"),
            name if name.starts_with("hyperv_clocksource") => Some("Hyper-V"),
            _ => None,
        });
        let of_tree = || read("/sys/firmware/devicetree/base/hypervisor/compatible");
        Signs {
            cpus: read("/proc/cpuinfo"),
            hypervisor: read("/sys/hypervisor/type").or_else(of_tree),
            firmware: firmware.join(" "),
            clock,
        }
    }

    /// Tests whether a line of this field of `/proc/cpuinfo` has this word.
    fn cpus_have(&self, field: &str, word: &str) -> bool {
        let mut lines = self.cpus.iter().flat_map(|text| text.lines());
        lines.any(|line| line.starts_with(field) && line.split_whitespace().any(|found| found == word))
    }

    /// Tests whether an x86 CPU reports a hypervisor. Those of arm64 cannot.
    pub(crate) fn is_flagged(&self) -> bool {
        self.cpus_have("flags", "hypervisor")
    }

    /// Returns the hypervisor's name, if evidence other than the CPU shows one.
    pub(crate) fn name(&self) -> Option<&str> {
        let is_of_ec2 = self.firmware.contains("Amazon EC2") && !self.firmware.contains(".metal");
        let is_virtual = is_of_ec2 || VIRTUAL_FIRMWARE.iter().any(|name| self.firmware.contains(name));
        self.hypervisor.as_deref().or(self.clock).or(is_virtual.then_some(&self.firmware))
    }

    /// Classifies the machine. QEMU's emulated x86 CPUs are called TCG. On arm64 its own `max` has no implementer, and
    /// those that it imitates cannot be distinguished from real ones.
    pub(crate) fn machine(&self) -> Machine {
        match () {
            () if self.cpus_have("model name", "TCG") || self.cpus_have("CPU implementer", "0x00") => Machine::Emulated,
            () if self.is_flagged() || self.name().is_some() => Machine::Virtual,
            () => Machine::Bare,
        }
    }
}

impl Machine {
    /// Returns the kind of this machine.
    pub fn this() -> Self {
        Signs::here().machine()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_an_offline_cpu_names_the_others() {
        let said = |asked: &[u32]| refuse_offline(asked, &[0, 1, 2, 5]).err().map(|error| error.to_string());
        assert_eq!(said(&[1, 77]).as_deref(), Some("CPU 77 is not online: choose from 0-2,5"));
        assert_eq!(said(&[0, 5]), None);
    }

    #[test]
    fn parses_steal_time_of_each_cpu() {
        let stat = "cpu  9 9 9 9 9 9 9 99 0 0\ncpu1 1 2 3 4 5 6 7 8 9 0\ncpu11 1 2 3 4 5 6 7 80 9 0\nctxt 5\n";
        assert_eq!([1, 11, 0].map(|cpu| stolen_ticks(stat, cpu)), [Some(8), Some(80), None]);
        assert_eq!(stolen_ticks("cpu0 1 2 3\n", 0), None);
    }

    #[test]
    fn reports_interrupts_without_tracepoints() {
        for has_preempt_count in [true, false] {
            let text = unseen_interrupts_of("Hyper-V clockevent", has_preempt_count).expect("VMBus has no tracepoints");
            assert!(text.contains("VMBus"), "{text}");
            assert_eq!(text.contains("unseen waker"), has_preempt_count, "{text}");
        }
        for device in ["lapic-deadline", "hpet", "xen", "arch_sys_timer"] {
            assert_eq!(unseen_interrupts_of(device, true), None, "{device}");
        }
    }

    #[test]
    fn parses_cpu_lists() {
        assert_eq!(numbers("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(numbers("\n"), Some(vec![]));
        assert_eq!(numbers("0-x"), None);
        assert_eq!(numbers("3-1"), None);
        assert_eq!(numbers("0-4000000000"), None);
        assert_eq!(numbers(&"0-65535,".repeat(9_000)), None);
        assert_eq!(list(&[0, 1, 2, 3, 8]), "0-3,8");
        assert_eq!(list(&[]), "");
    }

    #[test]
    fn classifies_machine_by_processor() {
        let machine_of = |model: &str, flags: &str| {
            let cpus = Some(format!("model name\t: {model}\nflags\t\t: fpu {flags}\n"));
            Signs { cpus, ..Signs::default() }.machine()
        };
        assert_eq!(machine_of("QEMU TCG CPU version 2.5+", "hypervisor apic"), Machine::Emulated);
        assert_eq!(machine_of("AMD EPYC", "apic hypervisor"), Machine::Virtual);
        assert_eq!(machine_of("AMD EPYC", "apic"), Machine::Bare);
        assert_eq!(Signs::default().machine(), Machine::Bare);
    }

    /// On arm64 no CPU reports a hypervisor.
    #[test]
    fn classifies_machine_by_firmware() {
        let machine_of = |implementer: &str, firmware: &str, hypervisor: Option<&str>| {
            let cpus = Some(format!("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: {implementer}\n"));
            let (firmware, hypervisor) = (firmware.to_owned(), hypervisor.map(str::to_owned));
            Signs { cpus, firmware, hypervisor, clock: None }.machine()
        };
        assert_eq!(machine_of("0x41", "Amazon EC2 c7g.large", None), Machine::Virtual);
        assert_eq!(machine_of("0x41", "Amazon EC2 c7g.metal", None), Machine::Bare);
        assert_eq!(machine_of("0x41", "Microsoft Corporation Virtual Machine", None), Machine::Virtual);
        assert_eq!(machine_of("0x41", "Google Google Compute Engine", None), Machine::Virtual);
        assert_eq!(machine_of("0x41", "QEMU KVM Virtual Machine", None), Machine::Virtual);
        assert_eq!(machine_of("0x61", "linux,dummy-virt", None), Machine::Virtual);
        assert_eq!(machine_of("0x41", "", Some("xen,xen-4.17")), Machine::Virtual);
        assert_eq!(machine_of("0x00", "linux,dummy-virt", None), Machine::Emulated);
        assert_eq!(machine_of("0x41", "Raspberry Pi 5 Model B Rev 1.0", None), Machine::Bare);
        assert_eq!(machine_of("0xc0", "Ampere Altra", None), Machine::Bare);
    }
}
