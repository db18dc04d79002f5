// SPDX-License-Identifier: MIT OR Apache-2.0
//! BPF programs of `events` and the maps that they count in.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::btf::types::Typedef;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Btf, Link};
use whylate_model::Histogram;
use whylate_model::ftrace::SectionFunctions;

pub(super) use self::skel::types::late_section;
use self::skel::types::{bucket_page, place, place_key, section, section_limits, section_lost};
use super::super::What;
use crate::kernel::attach::{self, PlainData, ProgramStatistics};
use crate::kernel::cpus;
use crate::kernel::distribution::{DistributionOffsets, Distributions, MAX_PAGES};
use crate::kernel::elements::Elements;
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::source::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/irqsoff/events.skel.rs"));
}

const MAX_PLACES: u32 = section_limits::MAX_PLACES.0;
const NAME_LENGTH: usize = section_limits::PLACE_NAME_LENGTH.0 as usize;
/// Five pages of histogram buckets for each call site: its sections mostly have similar lengths.
const PAGES: u32 = 5 * MAX_PLACES;
const _: () = assert!(PAGES <= MAX_PAGES, "a page has a number of 16 bits");

/// Reasons for lost events and their names in the output. `events.bpf.c` describes them.
const LOST: [(section_lost, &str); 4] = [
    (section_lost::SECTION_UNMATCHED, "unmatched"),
    (section_lost::SECTION_PLACES_FULL, "culprits_full"),
    (section_lost::SECTION_BUCKETS_FULL, "buckets_full"),
    (section_lost::SECTION_LATE_EVENTS, "late_events"),
];

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for late_section {}

/// Function names of a call site.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlaceNames {
    pub enabled_by: String,
    pub caller: String,
    pub disabled_by: String,
}

impl PlaceNames {
    pub(super) fn place(&self, what: What) -> SectionFunctions<'_> {
        SectionFunctions {
            is_preemption: what == What::Preemption,
            enabled_by: &self.enabled_by,
            caller: &self.caller,
            disabled_by: &self.disabled_by,
            handler: "",
        }
    }
}

pub(super) struct Programs {
    _links: Vec<Link>,
    records: Records,
    sections: MappedArray,
    places: Elements,
    lengths: Distributions,
    skeleton: skel::EventsSkel<'static>,
}

impl Programs {
    /// Attaches the programs. They count only on watched CPUs, of which there are none yet.
    pub(super) fn attach(what: What) -> Result<Self, AttachError> {
        let (begins, ends) = match what {
            What::Irqs => ("irq_disable", "irq_enable"),
            What::Preemption => ("preempt_disable", "preempt_enable"),
        };
        let types = Btf::from_vmlinux()?;
        let has = |event: &str| types.type_by_name::<Typedef<'_>>(&format!("btf_trace_{event}")).is_some();
        let mut open = skel::EventsSkelBuilder::default().open(attach::open_object())?;
        for mut program in open.open_object_mut().progs_mut() {
            let name = program.name().to_string_lossy().into_owned();
            let event = name.strip_prefix("on_").unwrap_or_default();
            let is_wanted = match event {
                "sched_switch" => what == What::Preemption,
                // Only on kernels with CPU hotplug.
                "cpuhp_enter" => has(event),
                event => event == begins || event == ends,
            };
            program.set_autoload(is_wanted);
        }
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.own_namespace = pid_namespace::as_setting();
        settings.page_limit = PAGES;
        let entries = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        open.maps.section_by_cpu.set_max_entries(entries)?;
        open.maps.bucket_pages.set_max_entries(PAGES)?;
        let skeleton = attach::load(open)?;
        let map =
            |map: &libbpf_rs::MapMut<'_>, entries: u32, bytes| MappedArray::new(map.as_fd(), entries as usize, bytes);
        let maps = &skeleton.maps;
        let sections = map(&maps.section_by_cpu, entries, size_of::<section>()).context("cannot map the sections")?;
        let places = map(&maps.place_by_id, MAX_PLACES, size_of::<place>()).context("cannot map the places")?;
        let key = offset_of!(place, key)..offset_of!(place, key) + size_of::<place_key>();
        let places = Elements::new(places, key, MAX_PLACES, &maps.place_by_key);
        let places = places.context("cannot open the table of places")?;
        let pages = map(&maps.bucket_pages, PAGES, size_of::<bucket_page>()).context("cannot map the histograms")?;
        let lengths = Distributions::new(Rc::new(pages), DistributionOffsets::new(offset_of!(place, length)));
        let records = Records::new(&skeleton.maps.late_sections)?;
        let programs = skeleton.object().progs_mut().filter(|program| program.autoload());
        let links = programs.map(|program| program.attach()).collect::<Result<Vec<_>, _>>()?;
        Ok(Programs { _links: links, records, sections, places, lengths, skeleton })
    }

    pub(super) fn watch(&self, cpu: u32) {
        self.sections.u32_at(cpu as usize, offset_of!(section, is_watched)).store(1, Ordering::Release);
    }

    /// Sets the minimum length of late events of the CPU; `u64::MAX` for none.
    pub(super) fn send_from(&self, cpu: u32, ns: u64) {
        self.counter(cpu, offset_of!(section, send_from_ns)).store(ns, Ordering::Release);
    }

    fn counter(&self, cpu: u32, offset: usize) -> &std::sync::atomic::AtomicU64 {
        self.sections.u64_at(cpu as usize, offset)
    }

    /// Returns the number of possible CPUs.
    pub(super) fn cpus(&self) -> u32 {
        self.sections.entries() as u32
    }

    /// Returns the lengths of sections since the last call, by call site.
    pub(super) fn take_lengths(&mut self) -> Vec<(PlaceNames, Histogram)> {
        let (mut taken, mut unused) = (Vec::new(), Vec::new());
        for id in self.places.counting() {
            let length = self.lengths.take(&self.places.array, id);
            if length.is_empty() {
                unused.push(id);
            } else {
                taken.push((self.names(id), length));
            }
        }
        if self.needs_room() {
            let names: Vec<PlaceNames> = unused.iter().map(|&id| self.names(id)).collect();
            let mut names = names.into_iter();
            let lengths = &mut self.lengths;
            // In the order of the indices.
            self.places.free(&unused, |places, id| {
                let rest = lengths.release(places, id);
                taken.extend(names.next().filter(|_| !rest.is_empty()).map(|names| (names, rest)));
            });
        }
        taken
    }

    pub(super) fn needs_room(&self) -> bool {
        self.places.is_half_full()
    }

    /// Returns the kernel's names of a section's functions from when its call site was first seen; `None` if that entry
    /// was freed.
    pub(super) fn names_of(&self, late: &late_section) -> Option<PlaceNames> {
        let id = late.place as usize;
        if id == 0 || id >= self.places.array.entries() {
            return None;
        }
        let names = self.names(id);
        let address = |at| self.places.array.u64_at(id, offset_of!(place, key) + at).load(Ordering::Relaxed);
        let key =
            [offset_of!(place_key, enabled_by), offset_of!(place_key, caller), offset_of!(place_key, disabled_by)];
        (key.map(address) == [late.key.enabled_by, late.key.caller, late.key.disabled_by]).then_some(names)
    }

    fn names(&self, id: usize) -> PlaceNames {
        let name = |offset: usize| {
            let byte = |at: usize| self.places.array.u8_at(id, offset + at).load(Ordering::Relaxed);
            let bytes: Vec<u8> = (0..NAME_LENGTH).map(byte).take_while(|&byte| byte != 0).collect();
            // Without its module: `function [module]`.
            let name = String::from_utf8_lossy(&bytes);
            name.split(' ').next().unwrap_or_default().to_owned()
        };
        PlaceNames {
            enabled_by: name(offset_of!(place, enabled_by)),
            caller: name(offset_of!(place, caller)),
            disabled_by: name(offset_of!(place, disabled_by)),
        }
    }

    pub(super) fn poll(&self, wait: Duration) -> anyhow::Result<()> {
        self.records.poll(wait)
    }

    pub(super) fn take_record(&self) -> Option<Box<[u8]>> {
        self.records.next()
    }

    pub(super) fn take_lost(&self) -> BTreeMap<String, u64> {
        let of = |reason: section_lost| {
            let offset = offset_of!(section, lost) + 8 * reason.0 as usize;
            (0..self.cpus()).map(|cpu| self.counter(cpu, offset).swap(0, Ordering::Relaxed)).sum()
        };
        LOST.into_iter().map(|(reason, name)| (name.to_owned(), of(reason))).collect()
    }

    pub(super) fn statistics(&self) -> ProgramStatistics {
        attach::statistics(self.skeleton.object().progs().filter(libbpf_rs::Program::autoload))
    }
}
