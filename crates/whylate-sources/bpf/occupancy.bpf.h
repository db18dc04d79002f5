/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Who has each CPU: the account that src/occupancy keeps. User space gives its maps to the programs of sources too. */
#pragma once

#include "cgroup.bpf.h"
#include "pid_namespace.bpf.h"

enum occupancy_limits {
	/* Intervals kept per CPU, at least: 40 ms of a CPU that switches 100,000 times a second. */
	INTERVAL_BITS = 12,
	/* And where the past is followed back from user space. */
	MOST_INTERVAL_BITS = 16,
	/* Programs look back at so many. */
	INTERVALS = 1 << INTERVAL_BITS,
	/* For so many intervals one request of a disk and one move are kept. */
	INTERVALS_A_REQUEST_BITS = 4,
	/* Requests in progress at any time, on all disks. */
	REQUESTS = 8192,
	/* Work items that are queued at a time; where two meet, the later one is kept. */
	ITEM_BITS = 12,
	ITEMS = 1 << ITEM_BITS,
	/* Intervals that one late event carries; older ones are merged by occupant. */
	WINDOW_INTERVALS = 256,
	MERGED_PARTS = 32,
	/* How many slots an occupant may lie away from its home among the merged parts. */
	MERGED_PROBES = 4,
	/* What explaining one late event costs beside the walk through the account, in steps of that. */
	EXPLAIN_EVENT_STEPS = 64,
	/* So many a second and CPU are its budget, and twice as many in a second after one without. */
	EXPLAIN_STEPS = 250000,
	/* Stacks of late interrupts that are kept. */
	LATE_STACKS = 8192,
	/* In place of the number of a known timer: the thread was held back as it had dirtied many pages. */
	DIRTY_THROTTLING = 255,
	/* Their numbers start again after the largest s32. */
	LATE_STACK_NUMBERS = 0x7fffffff,
	LATE_STACK_FRAMES = 64,
};

enum occupant_kind {
	/* Before the first switch on the CPU. */
	OCCUPANT_NOBODY,
	OCCUPANT_IDLE,
	/* `handler` is its cgroup's number. */
	OCCUPANT_THREAD,
	/* A worker thread with the item `handler`. */
	OCCUPANT_WORK,
	OCCUPANT_SOFTIRQ,
	/* A device's handler: `id` is the interrupt's number, `name` the handler's. */
	OCCUPANT_DEVICE_IRQ,
	/* `id` is an enum irq_vector. */
	OCCUPANT_VECTOR,
};

/* Interrupts that no device makes. */
enum irq_vector {
	VECTOR_LOCAL_TIMER,
	VECTOR_RESCHEDULE,
	VECTOR_CALL_FUNCTION,
	VECTOR_CALL_FUNCTION_SINGLE,
	VECTOR_IRQ_WORK,
	VECTOR_PLATFORM_IPI,
	VECTOR_THERMAL,
	VECTOR_THRESHOLD,
	VECTOR_DEFERRED_ERROR,
	VECTOR_ERROR,
	VECTOR_SPURIOUS,
	/* Other architectures: `name` says which. */
	VECTOR_NAMED,
	/* The timer's, told by a function that it calls. */
	VECTOR_UNANNOUNCED_TIMER,
};

enum busy_pools {
	BUSY_NORMAL = 1 << 0,
	BUSY_HIGHPRI = 1 << 1,
};

/* How a thread came by its CPU. */
enum entry_kind {
	/* It had it before. Also of interrupts, and of idle CPUs. */
	ENTRY_GOES_ON,
	/* Nobody has seen it woken. */
	ENTRY_UNSEEN,
	/* It could run ever since it lost its last CPU. */
	ENTRY_PREEMPTED,
	/* It was woken by `waker`. */
	ENTRY_THREAD,
	/* It is new, and `waker` has made it: as a process of its own, or as another thread of `waker`'s. */
	ENTRY_PARENT,
	ENTRY_PARENT_OF_THREAD,
	/* It was woken by none. Of a timer, `waker` is the number of its function among those that are known, or 0. */
	ENTRY_TIMER,
	ENTRY_NETWORK,
	ENTRY_RCU,
	ENTRY_SOFTIRQ,
	ENTRY_IRQ,
	/* `waker` is the position of the request that was done, on `waker_cpu`. */
	ENTRY_DISK,
	/* A bit beside these: it was moved here from another CPU's run queue, of which `moves_by_position` tells. */
	ENTRY_MOVED = 1 << 4,
	/* Bits beside these: enum stopper, of what it was when it was woken. */
	ENTRY_STOPPED_SHIFT = 5,
	ENTRY_STOPPED = 3 << ENTRY_STOPPED_SHIFT,
	/* Another bit: it had its CPU before, and begins a work item that was queued so. */
	ENTRY_OF_ITEM = 1 << 7,
};

struct entry {
	/* Or when it lost its last CPU, or its item was queued; 0: none of these. */
	u64 woken_ns;
	/* A thread as it is shown, or 0. */
	u32 waker;
	u16 waker_cpu;
	/* enum entry_kind */
	u8 kind;
	/* For how long it was throttled from then on, as `short_of_ns` has it; 0: it was not. */
	u8 throttled;
};

/* How a thread left its CPU; 0: it did not, or is not known. */
enum left_bits {
	/* The number of its system call plus one; 0: none. */
	LEFT_SYSCALL = (1 << 10) - 1,
	LEFT_PREEMPTED = 1 << 10,
	LEFT_BLOCKED = 2 << 10,
	LEFT_DEAD = 3 << 10,
	LEFT_HOW = 3 << 10,
	LEFT_UNINTERRUPTIBLE = 1 << 12,
	LEFT_IN_IOWAIT = 1 << 13,
	LEFT_IS_KERNEL = 1 << 14,
	/* Something has stopped it: enum stopper is in place of the two bits before the last one. */
	LEFT_STOPPED = 1 << 15,
	LEFT_STOPPER_SHIFT = 12,
};

/* One occupant without a break. It ends where the next one begins. */
struct interval {
	u64 start_ns;
	u64 handler;
	u32 id;
	/* enum occupant_kind */
	u8 kind;
	/* enum busy_pools */
	u8 busy;
	/* enum left_bits: of the last one of a thread's stay. */
	u16 left;
	u32 steal_ns;
	u32 nmi_ns;
	char name[16];
	/* Of the first one. */
	struct entry entry;
};
_Static_assert(sizeof(struct interval) == 64, "an interval takes more than one cache line");

/* A thread that could run was moved from one run queue to another. */
struct run_queue_move {
	u64 at_ns;
	/* The interval that it begins; another number while it is written. */
	u32 position;
	u32 from_cpu;
};

/* What a request of a disk does. */
enum disk_operation {
	DISK_READS,
	DISK_WRITES,
	DISK_FLUSHES,
	DISK_DOES_OTHER,
};

struct disk_request {
	u64 queued_ns;
	/* 0, as the former: not seen. */
	u64 issued_ns;
	/* Major << 20 | minor. */
	u32 device;
	/* As it is shown; 0: not known. */
	u32 submitter;
	/* Where it is among those that are done; another number while it is written. */
	u32 position;
	/* enum disk_operation */
	u8 operation;
	/* It has the device write its memory out before or after: it completes for each part. */
	u8 has_flush;
	u16 _unused;
};
_Static_assert(sizeof(struct disk_request) == 32, "a cache line holds two requests");

/* An interrupt that came late has no handler: its place holds these. */
struct lateness {
	u32 late_ns;
	/* The number of the stack that it found; negative without one. */
	s32 stack;
};

struct late_stack {
	/* Its number plus one; 0 while it is written. */
	u64 number;
	s64 bytes;
	/* Those of the tracepoint and of its program first. */
	u64 frames[LATE_STACK_FRAMES];
};

/* The state of one CPU's account. Only programs on that CPU write it. */
struct account {
	/* When the present occupant began; 0 before the first switch. */
	u64 since_ns;
	/* How many intervals have been written. */
	u32 written;
	/* A program is at work: what interrupts it must not be. */
	u8 is_busy;
	/* Bits of enum switch_step: whose programs the present switch concerns, as far as they have not run. */
	u8 steps;
	/* Of the interrupt, while `in_irq`. */
	u8 irq_kind;
	/* The CPU has so many intervals in a ring, as a power of two. */
	u8 interval_bits;

	/* The thread that has the CPU, below interrupts; its item, or 0, and its cgroup. */
	u64 handler;
	u64 cgroup;
	u32 tid;
	u8 kind;
	/* enum busy_pools of the thread itself, if it has an item. */
	u8 own_pool;
	u8 in_irq;
	/* Number of the softirq plus one. */
	u8 softirq;
	char name[16];
	/* Workers with an item that were preempted, by pool; 0 for none. */
	u32 preempted_normal;
	u32 preempted_highpri;
	/* The thread here whose timer is measured, by its struct task_struct; its source writes it. */
	u64 measured_task;

	/* Sums, and what they were when the present occupant began. */
	u64 nmi_ns;
	u64 nmi_seen_ns;
	u64 steal_seen_ns;

	/* The interrupt, while `in_irq`. */
	struct lateness lateness;
	u32 irq_id;
	char irq_name[16];
	/* The thread's number as it is shown; not written in the first PID namespace, where it is `tid`. */
	u32 shown_tid;
	/* What is above is used at each switch and interrupt, and takes two cache lines. */

	/* How the thread came by the CPU, until its first interval ends. */
	struct entry entry;
	/* The position plus one of the request done last, of a softirq and of an interrupt; 0: none since it began. */
	u32 completed[2];
	/* How many requests were done here. */
	u32 completions;
	/* Who has raised NET_TX and NET_RX, outside of interrupts. */
	u32 net_raisers[2];
	/* The function of a timer of high resolution is called. */
	u8 in_timer;
	/* The CPU was handed over while a program was at work that had been preempted. */
	u8 missed_switch;
	u16 _unused_yet;
	/* Address of the CPU's exact steal clock; 0: there is none, or it is not known yet. */
	u64 steal_clock;
	/* Events that came while a program was at work. */
	u64 nested;
	/* Stacks of late interrupts that were not taken. */
	u32 stacks_lost;
	/* Items whose place another one took before a worker began them. */
	u32 queuers_overwritten;
	/* How often another thread had the CPU than the one that was seen taking it. */
	u64 astray;
	/* From the scheduler's clock to CLOCK_MONOTONIC at the last switch; 0: not known, or not needed so far. */
	u64 clock_behind_ns;
	/* No stack is taken before. */
	u64 next_stack_ns;
	/* Until then the budget for explaining is used up. */
	u64 explained_until_ns;
	/* Requests that found no room, and those that were done without having been seen to begin. */
	u32 requests_full;
	u32 requests_unseen;
	/* When it was handed over first, where `missed_switch`. */
	u64 missed_ns;
	/* Address of the CPU's preemption count; 0: not known yet, or nowhere. */
	u64 preempt_count;
	/* Wakers, submitters and queuers that are not known: interrupts without a tracepoint. */
	u64 unseen_interrupts;
	/* The thread that has the CPU, by its struct task_struct: its number may change. */
	u64 task;
	/* Functions of the timers that expire, in a softirq and in an interrupt; 0: none. */
	u64 timers[2];
	/* Which known one has raised NET_TX and NET_RX; 0: none. */
	u8 net_timers[2];
	/* CPUs share no cache line. */
	u8 _unused_yet_either[38];
};
_Static_assert(__builtin_offsetof(struct account, entry) == 128, "what is used at each switch takes more than two cache lines");
_Static_assert(sizeof(struct account) % 64 == 0, "accounts of two CPUs share a cache line");

/* Late events of one source that have no causes. */
struct unexplained {
	/* Those beyond the budget of their CPU. */
	u64 over_budget;
	/* Those that found no room: the reader is too slow. */
	u64 no_room;
	/* How late all of these were in all. */
	u64 late_ns;
};

struct merged_part {
	u64 ns;
	u64 handler;
	u64 steal_ns;
	u64 nmi_ns;
	u32 id;
	u32 kind;
	char name[16];
};

/* The account of one CPU from a moment until now. */
struct window {
	/* No gap from here on. */
	u64 since_ns;
	u64 end_ns;
	u64 merged_start_ns;
	u64 merged_end_ns;
	u32 cpu;
	/* How many of `intervals` are in use, the latest first. */
	u32 count;
	/* Each interval has what was stolen of it; else the last one of a stay has all. */
	u32 is_steal_exact;
	u32 _unused;
	struct merged_part merged[MERGED_PARTS];
	struct interval intervals[WINDOW_INTERVALS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct account);
} account_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it 1 << interval_bits long for each CPU. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct interval);
} intervals_by_position SEC(".maps");

static __always_inline struct account *account_of(u32 cpu)
{
	return bpf_map_lookup_elem(&account_by_cpu, &cpu);
}

static __always_inline struct interval *interval_at(const struct account *account, u32 cpu, u32 position)
{
	u32 bits = account->interval_bits & 31;
	u32 index = (cpu << bits) | (position & ((1u << bits) - 1));

	return bpf_map_lookup_elem(&intervals_by_position, &index);
}

/* Where a CPU has a request or a move, of which there are fewer than intervals. */
static __always_inline u32 index_of_detail(const struct account *account, u32 cpu, u32 position)
{
	u32 bits = (account->interval_bits - INTERVALS_A_REQUEST_BITS) & 31;

	return (cpu << bits) | (position & ((1u << bits) - 1));
}

static __always_inline void describe_thread(struct interval *interval, const struct account *account)
{
	interval->handler = account->handler ? account->handler : account->cgroup;
	interval->id = own_namespace ? account->shown_tid : account->tid;
	interval->kind = account->handler ? OCCUPANT_WORK : account->kind;
	__builtin_memcpy(interval->name, account->name, sizeof(interval->name));
}

/* Writes down who has the CPU now. */
static __always_inline void describe(struct interval *interval, const struct account *account)
{
	interval->start_ns = account->since_ns;
	interval->left = 0;
	interval->entry = account->entry;
	interval->busy = account->own_pool;
	if (account->preempted_normal)
		interval->busy |= BUSY_NORMAL;
	if (account->preempted_highpri)
		interval->busy |= BUSY_HIGHPRI;
	interval->steal_ns = 0;
	interval->nmi_ns = account->nmi_ns - account->nmi_seen_ns;
	if (account->in_irq) {
		interval->handler = *(const u64 *)&account->lateness;
		interval->id = account->irq_id;
		interval->kind = account->irq_kind;
		__builtin_memcpy(interval->name, account->irq_name, sizeof(interval->name));
	} else if (account->softirq) {
		interval->handler = 0;
		interval->id = account->softirq - 1;
		interval->kind = OCCUPANT_SOFTIRQ;
	} else {
		describe_thread(interval, account);
	}
}
