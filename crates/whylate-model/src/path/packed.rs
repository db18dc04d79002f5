// SPDX-License-Identifier: MIT OR Apache-2.0
//! A timeline of any length in little memory: slices in packed blocks, which spill into a file beyond a limit.

use std::collections::HashMap;
use std::io::{self, Read, Seek, SeekFrom, Write};

use super::history::{
    Blocked, CpuTimeline, Holder, Move, Moves, Name, Operation, Request, RunSlice, SwitchIn, SwitchOut, Waker,
};
use super::timer::TimerKind;
use crate::wait::Stop;

/// Number of slices in a block.
const BLOCK_SLICES: usize = 4_096;
/// Maximum size of a packed slice in bytes.
const MAX_SLICE_BYTES: usize = 144;

/// Storage of a block.
#[derive(Debug)]
enum Storage {
    Memory(Vec<u8>),
    File { at: u64, bytes: usize },
}

/// Timeline of one CPU.
#[derive(Debug, Default)]
struct CpuBlocks {
    blocks: Vec<Storage>,
    /// Slices not packed yet, in order of time.
    loose: Vec<RunSlice>,
}

/// Timeline of all CPUs. Blocks beyond a memory limit spill into a file; without one, the oldest are dropped.
#[derive(Debug)]
pub struct Packed<F> {
    lanes: Vec<CpuBlocks>,
    file: Option<F>,
    end: u64,
    in_memory_bytes: usize,
    limit_bytes: usize,
    given_up: u64,
    error: Option<io::Error>,
}

impl<F: Read + Write + Seek> Packed<F> {
    /// Creates an empty timeline of `cpus` CPUs.
    pub fn new(cpus: usize, limit_bytes: usize, file: Option<F>) -> Self {
        let lanes = (0..cpus).map(|_| CpuBlocks::default()).collect();
        Packed { lanes, file, end: 0, in_memory_bytes: 0, limit_bytes, given_up: 0, error: None }
    }

    /// Adds the next slice of a CPU. Drops the spill file if it cannot be written.
    pub fn push(&mut self, cpu: usize, slice: RunSlice) {
        let Some(lane) = self.lanes.get_mut(cpu) else { return };
        lane.loose.push(slice);
        if lane.loose.len() < BLOCK_SLICES {
            return;
        }
        let bytes = pack(&lane.loose);
        lane.loose.clear();
        if self.in_memory_bytes + bytes.len() > self.limit_bytes
            && let Some(file) = &mut self.file
        {
            let written = file.seek(SeekFrom::Start(self.end)).and_then(|_| file.write_all(&bytes));
            if written.is_ok() {
                lane.blocks.push(Storage::File { at: self.end, bytes: bytes.len() });
                self.end += bytes.len() as u64;
                return;
            }
            self.give_up_file();
        }
        self.in_memory_bytes += bytes.len();
        self.lanes[cpu].blocks.push(Storage::Memory(bytes));
        self.evict_oldest();
    }

    /// Discards spilled blocks and releases the spill file.
    pub fn give_up_file(&mut self) {
        self.file = None;
        for lane in &mut self.lanes {
            let before = lane.blocks.len();
            lane.blocks.retain(|block| matches!(block, Storage::Memory(_)));
            self.given_up += ((before - lane.blocks.len()) * BLOCK_SLICES) as u64;
        }
    }

    /// Returns the spill file.
    pub fn file(&self) -> Option<&F> {
        self.file.as_ref()
    }

    /// Returns the number of slices that were dropped for lack of room.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Returns and clears the error of a block that could not be read back; all before this block is lost.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    /// Returns the number of bytes written to the spill file.
    pub fn in_file_bytes(&self) -> u64 {
        self.end
    }

    /// Drops oldest blocks of the CPU with most blocks until memory is within the limit.
    fn evict_oldest(&mut self) {
        while self.in_memory_bytes > self.limit_bytes {
            let Some(lane) = self.lanes.iter_mut().max_by_key(|lane| lane.blocks.len()) else { return };
            if lane.blocks.is_empty() {
                return;
            }
            self.given_up += BLOCK_SLICES as u64;
            if let Storage::Memory(bytes) = lane.blocks.remove(0) {
                self.in_memory_bytes -= bytes.len();
            }
        }
    }

    fn take_block(&mut self, cpu: usize) -> Option<io::Result<Vec<RunSlice>>> {
        let block = self.lanes.get_mut(cpu)?.blocks.pop()?;
        Some(match (block, &mut self.file) {
            (Storage::Memory(bytes), _) => {
                self.in_memory_bytes -= bytes.len();
                unpack(&bytes)
            }
            (Storage::File { at, bytes }, Some(file)) => {
                let mut buffer = vec![0; bytes];
                let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut buffer));
                read.and_then(|()| unpack(&buffer))
            }
            (Storage::File { .. }, None) => Err(io::ErrorKind::NotFound.into()),
        })
    }
}

/// Slices are dropped as they are returned.
impl<F: Read + Write + Seek> CpuTimeline for Packed<F> {
    fn cpus(&self) -> usize {
        self.lanes.len()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
        if self.lanes.get(cpu)?.loose.is_empty() {
            match self.take_block(cpu)? {
                Ok(slices) => self.lanes[cpu].loose = slices,
                Err(error) => {
                    self.error = Some(error);
                    self.lanes[cpu].blocks.clear();
                }
            }
        }
        self.lanes[cpu].loose.pop()
    }
}

/// Writes integers as LEB128: seven bits in each byte.
struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    /// Writes the signed distance between two times (zigzag).
    fn distance(&mut self, ns: u64, from_ns: u64) {
        let distance = ns.wrapping_sub(from_ns) as i64;
        self.number((distance << 1 ^ distance >> 63) as u64);
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> io::Result<u8> {
        let (&byte, rest) = self.0.split_first().ok_or(io::ErrorKind::UnexpectedEof)?;
        self.0 = rest;
        Ok(byte)
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }

    fn small(&mut self) -> io::Result<u32> {
        u32::try_from(self.number()?).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    fn distance(&mut self, from_ns: u64) -> io::Result<u64> {
        let number = self.number()?;
        let distance = (number >> 1) as i64 ^ -((number & 1) as i64);
        Ok(from_ns.wrapping_add(distance as u64))
    }
}

const GOES_ON: u8 = 1 << 7;
const IS_MEMBER: u8 = 1 << 6;
const HAS_STEAL: u8 = 1 << 5;
const HAS_QUOTA: u8 = 1 << 4;
const IS_MOVED: u8 = 1 << 3;
const KIND: u8 = 7;
/// Flags of a slice's migrations.
const MOVES_HAVE_GAP: u8 = 1;
const MOVED_BEFORE: u8 = 2;
/// Flag besides the kind of an entry.
const QUEUED: u8 = 1 << 7;
const ENTRY_STOP_SHIFT: u8 = 4;
const ENTRY_KIND: u8 = (1 << ENTRY_STOP_SHIFT) - 1;
/// Shift of the stop bits in the byte of a switch-out.
const EXIT_STOP_SHIFT: u8 = 5;

fn pack(slices: &[RunSlice]) -> Vec<u8> {
    let mut to = Writer(Vec::with_capacity(slices.len() * 12));
    let mut names: HashMap<Name, u64> = HashMap::new();
    let mut end_ns = 0;
    to.number(slices.len() as u64);
    for slice in slices {
        let (kind, numbers): (u8, [Option<u64>; 2]) = match slice.holder {
            Holder::Unrecorded => (0, [None; 2]),
            Holder::Idle => (1, [None; 2]),
            Holder::Thread(tid) => (2, [Some(tid.into()), None]),
            Holder::Work { tid, handler } => (3, [Some(tid.into()), Some(handler)]),
            Holder::Irq { late_ns } => (4, [Some(late_ns), None]),
            Holder::Softirq => (5, [None; 2]),
        };
        let goes_on = slice.entry == SwitchIn::GoesOn && slice.exit == SwitchOut::GoesOn;
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        let flags = flag(goes_on, GOES_ON)
            | flag(slice.is_member, IS_MEMBER)
            | flag(slice.steal_ns > 0, HAS_STEAL)
            | flag(slice.throttled_ns > 0, HAS_QUOTA)
            | flag(slice.moved.is_some(), IS_MOVED);
        to.0.push(kind | flags);
        to.distance(slice.start_ns, end_ns);
        to.distance(slice.end_ns, slice.start_ns);
        end_ns = slice.end_ns;
        numbers.into_iter().flatten().for_each(|number| to.number(number));
        // A name is written in full at its first use, and as an index afterwards.
        let known = names.len() as u64;
        let number = *names.entry(slice.name).or_insert(known);
        to.number(number);
        if number == known {
            to.0.extend_from_slice(&slice.name.0);
        }
        if slice.steal_ns > 0 {
            to.number(slice.steal_ns);
        }
        // The cgroup is needed only for quotas.
        if slice.throttled_ns > 0 {
            to.number(slice.throttled_ns);
            to.number(slice.cgroup.map_or(0, |number| number.saturating_add(1)));
        }
        if let Some(Moves { last, first, has_gap }) = slice.moved {
            pack_move(&mut to, last, slice.start_ns);
            to.0.push(flag(has_gap, MOVES_HAVE_GAP) | flag(first.is_some(), MOVED_BEFORE));
            if let Some(first) = first {
                pack_move(&mut to, first, slice.start_ns);
            }
        }
        if !goes_on {
            pack_entry(&mut to, slice);
            pack_exit(&mut to, slice.exit);
        }
    }
    to.0
}

fn pack_move(to: &mut Writer, of: Move, start_ns: u64) {
    to.distance(of.at_ns, start_ns);
    to.number(of.from_cpu.into());
}

fn unpack_move(from: &mut Reader<'_>, start_ns: u64) -> io::Result<Move> {
    Ok(Move { at_ns: from.distance(start_ns)?, from_cpu: from.small()? })
}

fn pack_entry(to: &mut Writer, slice: &RunSlice) {
    let (queued, at_ns, by, cpu) = match slice.entry {
        SwitchIn::GoesOn => return to.0.push(0),
        SwitchIn::Preempted { at_ns } => {
            to.0.push(1);
            return to.distance(at_ns, slice.start_ns);
        }
        SwitchIn::Unseen => return to.0.push(2),
        SwitchIn::Woken { at_ns, by, cpu } => (0, at_ns, by, cpu),
        SwitchIn::Queued { at_ns, by, cpu } => (QUEUED, at_ns, by, cpu),
    };
    to.0.push(
        queued
            | pack_stop(slice.stopped) << ENTRY_STOP_SHIFT
            | match by {
                Waker::Thread(_) => 3,
                Waker::Parent(_) => 4,
                Waker::Timer(_) => 5,
                Waker::Network => 6,
                Waker::Rcu => 7,
                Waker::Softirq => 8,
                Waker::Irq => 9,
                Waker::Disk(_) => 10,
            },
    );
    to.distance(at_ns, slice.start_ns);
    to.number(cpu.into());
    match by {
        Waker::Thread(tid) | Waker::Parent(tid) => to.number(tid.into()),
        Waker::Disk(request) => {
            to.distance(request.queued_ns, slice.start_ns);
            to.distance(request.issued_ns, slice.start_ns);
            to.number(request.device.into());
            to.number(request.submitter.into());
            to.0.push(request.operation as u8);
        }
        Waker::Timer(of) => to.0.push(of as u8),
        Waker::Network | Waker::Rcu | Waker::Softirq | Waker::Irq => {}
    }
}

/// Encodes a stop in two bits.
fn pack_stop(stop: Option<Stop>) -> u8 {
    match stop {
        None => 0,
        Some(Stop::Signal) => 1,
        Some(Stop::Tracer) => 2,
        Some(Stop::Freezer) => 3,
    }
}

fn unpack_stop(bits: u8) -> Option<Stop> {
    [None, Some(Stop::Signal), Some(Stop::Tracer), Some(Stop::Freezer)][usize::from(bits & 3)]
}

fn pack_exit(to: &mut Writer, exit: SwitchOut) {
    match exit {
        SwitchOut::GoesOn => to.0.push(0),
        SwitchOut::Preempted => to.0.push(1),
        SwitchOut::Dead => to.0.push(2),
        SwitchOut::Blocked(Blocked { syscall, is_uninterruptible, in_iowait, is_kernel, stop }) => {
            let flag = |is: bool, bit: u8| u8::from(is) << bit;
            let stop = pack_stop(stop) << EXIT_STOP_SHIFT;
            to.0.push(3 | flag(is_uninterruptible, 2) | flag(in_iowait, 3) | flag(is_kernel, 4) | stop);
            to.number(syscall.map_or(0, |number| u64::from(number) + 1));
        }
    }
}

fn unpack(bytes: &[u8]) -> io::Result<Vec<RunSlice>> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut from = Reader(bytes);
    let count = from.number()?;
    if count > BLOCK_SLICES as u64 || bytes.len() > BLOCK_SLICES * MAX_SLICE_BYTES {
        return Err(invalid());
    }
    let mut slices: Vec<RunSlice> = Vec::with_capacity(count as usize);
    let mut names: Vec<Name> = Vec::new();
    let mut end_ns = 0;
    for _ in 0..count {
        let kind = from.byte()?;
        let start_ns = from.distance(end_ns)?;
        end_ns = from.distance(start_ns)?;
        let holder = match kind & KIND {
            0 => Holder::Unrecorded,
            1 => Holder::Idle,
            2 => Holder::Thread(from.small()?),
            3 => Holder::Work { tid: from.small()?, handler: from.number()? },
            4 => Holder::Irq { late_ns: from.number()? },
            5 => Holder::Softirq,
            _ => return Err(invalid()),
        };
        let number = from.number()? as usize;
        if number == names.len() {
            let mut name = Name::default();
            for byte in &mut name.0 {
                *byte = from.byte()?;
            }
            names.push(name);
        }
        let name = *names.get(number).ok_or_else(invalid)?;
        let steal_ns = if kind & HAS_STEAL != 0 { from.number()? } else { 0 };
        let mut slice = RunSlice { start_ns, end_ns, holder, name, steal_ns, ..RunSlice::default() };
        if kind & HAS_QUOTA != 0 {
            (slice.throttled_ns, slice.cgroup) = (from.number()?, from.number()?.checked_sub(1));
        }
        if kind & IS_MOVED != 0 {
            let last = unpack_move(&mut from, start_ns)?;
            let flags = from.byte()?;
            let first = (flags & MOVED_BEFORE != 0).then(|| unpack_move(&mut from, start_ns)).transpose()?;
            slice.moved = Some(Moves { last, first, has_gap: flags & MOVES_HAVE_GAP != 0 });
        }
        slice.is_member = kind & IS_MEMBER != 0;
        if kind & GOES_ON == 0 {
            (slice.entry, slice.stopped) = unpack_entry(&mut from, start_ns)?;
            slice.exit = unpack_exit(&mut from)?;
        }
        slices.push(slice);
    }
    Ok(slices)
}

fn unpack_entry(from: &mut Reader<'_>, start_ns: u64) -> io::Result<(SwitchIn, Option<Stop>)> {
    let kind = from.byte()?;
    match kind {
        0 => return Ok((SwitchIn::GoesOn, None)),
        1 => return Ok((SwitchIn::Preempted { at_ns: from.distance(start_ns)? }, None)),
        2 => return Ok((SwitchIn::Unseen, None)),
        _ => {}
    }
    let (at_ns, cpu) = (from.distance(start_ns)?, from.small()?);
    let by = match kind & ENTRY_KIND {
        3 => Waker::Thread(from.small()?),
        4 => Waker::Parent(from.small()?),
        5 => Waker::Timer(TimerKind::from_number(from.byte()?).ok_or(io::ErrorKind::InvalidData)?),
        6 => Waker::Network,
        7 => Waker::Rcu,
        8 => Waker::Softirq,
        9 => Waker::Irq,
        10 => Waker::Disk(Request {
            queued_ns: from.distance(start_ns)?,
            issued_ns: from.distance(start_ns)?,
            device: from.small()?,
            submitter: from.small()?,
            operation: match from.byte()? {
                0 => Operation::Read,
                1 => Operation::Write,
                2 => Operation::Flush,
                _ => Operation::Other,
            },
        }),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let stopped = unpack_stop(kind >> ENTRY_STOP_SHIFT);
    let is_queued = kind & QUEUED != 0;
    Ok((if is_queued { SwitchIn::Queued { at_ns, by, cpu } } else { SwitchIn::Woken { at_ns, by, cpu } }, stopped))
}

fn unpack_exit(from: &mut Reader<'_>) -> io::Result<SwitchOut> {
    let kind = from.byte()?;
    Ok(match kind & 3 {
        0 => SwitchOut::GoesOn,
        1 => SwitchOut::Preempted,
        2 => SwitchOut::Dead,
        _ => SwitchOut::Blocked(Blocked {
            is_uninterruptible: kind & 1 << 2 != 0,
            in_iowait: kind & 1 << 3 != 0,
            is_kernel: kind & 1 << 4 != 0,
            stop: unpack_stop(kind >> EXIT_STOP_SHIFT),
            syscall: match from.number()? {
                0 => None,
                number => Some(u16::try_from(number - 1).map_err(|_| io::ErrorKind::InvalidData)?),
            },
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::super::tests::any_slice;
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn pack_and_unpack_round_trip(slices in prop::collection::vec(any_slice(), 0..60)) {
            prop_assert_eq!(unpack(&pack(&slices)).expect("it was packed"), slices);
        }

        #[test]
        fn garbage_is_an_error_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = unpack(&bytes);
        }
    }

    fn numbered(count: u64) -> impl Iterator<Item = RunSlice> {
        (0..count).map(|at| RunSlice {
            start_ns: at * 10,
            end_ns: at * 10 + 10,
            holder: Holder::Thread(at as u32 % 7),
            ..RunSlice::default()
        })
    }

    #[test]
    fn spills_blocks_beyond_memory_limit() {
        let mut packed = Packed::new(1, 100_000, Some(Cursor::new(Vec::new())));
        numbered(100_000).for_each(|slice| packed.push(0, slice));
        assert!(packed.in_memory_bytes <= 100_000 && packed.in_file_bytes() > 100_000);
        let mut back: Vec<RunSlice> = std::iter::from_fn(|| packed.previous(0)).collect();
        back.reverse();
        assert!(back.into_iter().eq(numbered(100_000)));
        assert!(packed.take_error().is_none());
    }

    #[test]
    fn without_spill_file_evicts_oldest_block() {
        let mut packed = Packed::<Cursor<Vec<u8>>>::new(1, 100_000, None);
        numbered(100_000).for_each(|slice| packed.push(0, slice));
        let back: Vec<RunSlice> = std::iter::from_fn(|| packed.previous(0)).collect();
        assert!(back.len() > 5_000 && back.len() < 50_000, "{}", back.len());
        assert_eq!(back[0], numbered(100_000).last().expect("there are some"));
        assert_eq!(packed.given_up() + back.len() as u64, 100_000);
    }

    /// Accepts at most this many bytes.
    struct Full(Cursor<Vec<u8>>, usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let room = self.1.saturating_sub(self.0.position() as usize).min(bytes.len());
            if room == 0 { Err(io::ErrorKind::StorageFull.into()) } else { self.0.write(&bytes[..room]) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Full {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Seek for Full {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }

    #[test]
    fn drops_spill_file_when_disk_full_and_keeps_newest() {
        let mut packed = Packed::new(1, 100_000, Some(Full(Cursor::new(Vec::new()), 150_000)));
        numbered(100_000).for_each(|slice| packed.push(0, slice));
        assert!(packed.file().is_none() && packed.in_memory_bytes <= 100_000);
        let back: Vec<RunSlice> = std::iter::from_fn(|| packed.previous(0)).collect();
        assert_eq!(back[0], numbered(100_000).last().expect("there are some"));
        assert_eq!(packed.given_up() + back.len() as u64, 100_000);
        assert!(packed.take_error().is_none());
    }
}
