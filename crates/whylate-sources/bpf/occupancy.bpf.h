/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* CPU occupancy: the account that src/cpu_account keeps. User space shares its maps with the programs of sources. */
#pragma once

#include "cgroup.bpf.h"
#include "pid_namespace.bpf.h"

enum occupancy_limits {
	/* Minimum number of intervals kept per CPU: 40 ms of a CPU with 100,000 switches per second. */
	INTERVAL_BITS = 12,
	/* The maximum, if user space follows the history back. */
	MAX_INTERVAL_BITS = 16,
	/* Likewise for several sources, which read it five times a second: 0.3 s of a CPU with 100,000 switches per second. */
	MAX_SHARED_INTERVAL_BITS = 15,
	/* Number of intervals that programs look back. */
	INTERVALS = 1 << INTERVAL_BITS,
	/* One block request and one run queue move are kept per this number of intervals, up to a maximum. */
	INTERVALS_A_REQUEST_BITS = 3,
	MAX_REQUEST_BITS = 12,
	/* Block requests in progress, on all disks. */
	REQUESTS = 8192,
	/* Work items that are queued; on a hash collision the later one is kept. */
	ITEM_BITS = 12,
	ITEMS = 1 << ITEM_BITS,
	/* Intervals in one late event; older ones are merged by occupant. */
	WINDOW_INTERVALS = 256,
	MERGED_PARTS = 32,
	/* Maximum distance of an occupant from its home slot among the merged parts. */
	MERGED_PROBES = 4,
	/* Fixed cost of explaining one late event, in steps of the walk through the account. */
	EXPLAIN_EVENT_STEPS = 64,
	/* Budget in steps per second and CPU, and twice as many after a second without late events. */
	EXPLAIN_STEPS = 250000,
	/* Number of stacks of late interrupts that are kept; beside other sources, a second of a 1 ms timer with few CPUs. */
	LATE_STACKS_PER_CPU = 1024,
	MIN_LATE_STACKS = 2048,
	MAX_LATE_STACKS = 8192,
	/* Special number of a known timer: the thread was throttled because it had dirtied many pages. */
	DIRTY_THROTTLING = 255,
	/* Likewise: its cgroup is over its memory limit, or it waits for reclaim. */
	MEMORY_LIMIT = 254,
	/* Stack numbers wrap after the largest s32. */
	LATE_STACK_NUMBERS = 0x7fffffff,
	LATE_STACK_FRAMES = 64,
};

enum occupant_kind {
	/* Before the first switch on the CPU. */
	OCCUPANT_NOBODY,
	OCCUPANT_IDLE,
	/* `handler` is its cgroup's ID. */
	OCCUPANT_THREAD,
	/* A worker thread with the item `handler`. */
	OCCUPANT_WORK,
	OCCUPANT_SOFTIRQ,
	/* A device's handler: `id` is the interrupt's number, `name` the handler's. */
	OCCUPANT_DEVICE_IRQ,
	/* `id` is an enum irq_vector. */
	OCCUPANT_VECTOR,
};

/* Interrupts that are not raised by devices. */
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
	/* A timer interrupt without a tracepoint, recognized by a function that it calls. */
	VECTOR_UNANNOUNCED_TIMER,
};

enum busy_pools {
	BUSY_NORMAL = 1 << 0,
	BUSY_HIGHPRI = 1 << 1,
};

/* Reason for a thread's switch-in. */
enum entry_kind {
	/* It was running before. Also for interrupts, and for idle CPUs. */
	ENTRY_GOES_ON,
	/* Its wakeup was not seen. */
	ENTRY_UNSEEN,
	/* It was runnable ever since it was preempted. */
	ENTRY_PREEMPTED,
	/* Woken by `waker`. */
	ENTRY_THREAD,
	/* Created by `waker`: as a process of its own, or as another thread of the process. */
	ENTRY_PARENT,
	ENTRY_PARENT_OF_THREAD,
	/* Woken by no thread. For a timer, `waker` is the number of its function among the known ones, or 0. */
	ENTRY_TIMER,
	ENTRY_NETWORK,
	ENTRY_RCU,
	ENTRY_SOFTIRQ,
	ENTRY_IRQ,
	/* `waker` is the position of the completed request, on `waker_cpu`. */
	ENTRY_DISK,
	/* Flag: it was moved here from another CPU's run queue, as described in `moves_by_position`. */
	ENTRY_MOVED = 1 << 4,
	/* Flags: enum stopper that had stopped it when it was woken. */
	ENTRY_STOPPED_SHIFT = 5,
	ENTRY_STOPPED = 3 << ENTRY_STOPPED_SHIFT,
	/* Flag: it was running before, and starts a work item that was queued for this reason. */
	ENTRY_OF_ITEM = 1 << 7,
};

struct entry {
	/* Time of the wakeup, the preemption, or the queueing of its item; 0: none of these. */
	u64 woken_ns;
	/* A TID in whylate's PID namespace, or 0. */
	u32 waker;
	u16 waker_cpu;
	/* enum entry_kind */
	u8 kind;
	/* How long it was throttled from then on, in the encoding of `short_of_ns`; 0: it was not. */
	u8 throttled;
};

/* Reason for a thread's switch-out; 0: it was not switched out, or unknown. */
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
	/* It was stopped: enum stopper replaces the two bits before the last one. */
	LEFT_STOPPED = 1 << 15,
	LEFT_STOPPER_SHIFT = 12,
};

/* A span of time with one occupant. It ends at the start of the next one. */
struct interval {
	u64 start_ns;
	u64 handler;
	u32 id;
	/* enum occupant_kind */
	u8 kind;
	/* enum busy_pools */
	u8 busy;
	/* enum left_bits, in the last interval of a thread's run slice. */
	u16 left;
	u32 steal_ns;
	u32 nmi_ns;
	char name[16];
	/* In the first interval of a run slice. */
	struct entry entry;
};
_Static_assert(sizeof(struct interval) == 64, "an interval takes more than one cache line");

/* Moves of a thread between run queues during one wait. */
struct moves {
	/* 0: not moved. */
	u64 last_ns;
	/* 0: the last one is the only one, or the first one was overwritten. */
	u64 first_ns;
	u32 last_from;
	u32 first_from;
	u32 count;
	u32 _unused;
};

/* Operation of a block request. */
enum disk_operation {
	DISK_READS,
	DISK_WRITES,
	DISK_FLUSHES,
	DISK_DOES_OTHER,
};

struct disk_request {
	u64 queued_ns;
	/* 0, as above: not seen. */
	u64 issued_ns;
	/* Major << 20 | minor. */
	u32 device;
	/* TID in whylate's PID namespace; 0: unknown. */
	u32 submitter;
	/* Index among the completed ones; a different number while being written. */
	u32 position;
	/* enum disk_operation */
	u8 operation;
	/* It flushes the device's cache before or after: it completes for each part. */
	u8 has_flush;
	u16 _unused;
};
_Static_assert(sizeof(struct disk_request) == 32, "a cache line holds two requests");

/* Replaces the handler of an interrupt that came late. */
struct lateness {
	u32 late_ns;
	/* Number of the interrupted stack; negative without one. */
	s32 stack;
};

struct late_stack {
	/* Its number plus one; 0 while being written. */
	u64 number;
	s64 bytes;
	/* Frames of the tracepoint and of its program come first. */
	u64 frames[LATE_STACK_FRAMES];
};

/* State of one CPU's account. Only programs on that CPU write it. */
struct account {
	/* Start of the current occupant; 0 before the first switch. */
	u64 since_ns;
	/* Number of intervals written. */
	u32 written;
	/* A program is updating the account: programs that interrupt it must not. */
	u8 is_busy;
	/* Bits of enum switch_step: sources that the current switch concerns, as far as their programs have not run. */
	u8 steps;
	/* Kind of the interrupt, while `in_irq`. */
	u8 irq_kind;
	/* Log2 of the size of the CPU's ring of intervals. */
	u8 interval_bits;

	/* The thread on the CPU, below interrupts; its item, or 0, and its cgroup. */
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
	/* Preempted workers with an item, by pool; 0 for none. */
	u32 preempted_normal;
	u32 preempted_highpri;
	/* The thread here with the measured timer, by its struct task_struct; its source writes it. */
	u64 measured_task;

	/* Sums, and their values at the start of the current occupant. */
	u64 nmi_ns;
	u64 nmi_seen_ns;
	u64 steal_seen_ns;

	/* The interrupt, while `in_irq`. */
	struct lateness lateness;
	u32 irq_id;
	char irq_name[16];
	/* The TID in whylate's PID namespace; not set in the first PID namespace, where it is `tid`. */
	u32 shown_tid;
	/* Fields above are used at each switch and interrupt, and take two cache lines. */

	/* Reason for the thread's switch-in, until its first interval ends. */
	struct entry entry;
	/* Position plus one of the last completed request, of a softirq and of an interrupt; 0: none since it started. */
	u32 completed[2];
	/* Number of requests completed here. */
	u32 completions;
	/* Threads that raised NET_TX and NET_RX, outside of interrupts. */
	u32 net_raisers[2];
	/* The function of an hrtimer is running. */
	u8 in_timer;
	/* The CPU was switched while a preempted program was updating the account. */
	u8 missed_switch;
	u16 _unused_yet;
	/* Address of the CPU's exact steal clock; 0: there is none, or it is not known yet. */
	u64 steal_clock;
	/* Number of events during an update by another program. */
	u64 nested;
	/* Number of stacks of late interrupts that were not captured. */
	u32 stacks_lost;
	/* Number of queued items that were overwritten by a colliding one before a worker started them. */
	u32 queuers_overwritten;
	/* How often another thread was on the CPU than the last one that was seen switching in. */
	u64 astray;
	/* Offset from the scheduler's clock to CLOCK_MONOTONIC at the last switch; 0: unknown, or not needed so far. */
	u64 clock_behind_ns;
	/* Earliest time of the next stack. */
	u64 next_stack_ns;
	/* Until when the budget for explaining is used up. */
	u64 explained_until_ns;
	/* Number of requests that found no room, and of completed requests without a visible start. */
	u32 requests_full;
	u32 requests_unseen;
	/* Time of the first missed switch, if `missed_switch`. */
	u64 missed_ns;
	/* Address of the CPU's preemption count; 0: not known yet, or nowhere. */
	u64 preempt_count;
	/* Number of unknown wakers, submitters and queuers: interrupts without a tracepoint. */
	u64 unseen_interrupts;
	/* The thread on the CPU, by its struct task_struct: its TID may change. */
	u64 task;
	/* Functions of the expiring timers, in a softirq and in an interrupt; 0: none. */
	u64 timers[2];
	/* Known timers that raised NET_TX and NET_RX; 0: none. */
	u8 net_timers[2];
	/* CPUs share no cache line. */
	u8 _unused_yet_either[38];
};
_Static_assert(__builtin_offsetof(struct account, entry) == 128, "what is used at each switch takes more than two cache lines");
_Static_assert(sizeof(struct account) % 64 == 0, "accounts of two CPUs share a cache line");

/* Late events of one source without causes. */
struct unexplained {
	/* Number of those beyond the budget of their CPU. */
	u64 over_budget;
	/* Number of those without room in the ring: the reader is too slow. */
	u64 no_room;
	/* Total latency of all of these. */
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

/* The account of one CPU from some time until now. */
struct window {
	/* No gap from here on. */
	u64 since_ns;
	u64 end_ns;
	u64 merged_start_ns;
	u64 merged_end_ns;
	u32 cpu;
	/* Number of `intervals` in use, the latest first. */
	u32 count;
	/* Each interval has its own steal time; otherwise the last one of a run slice has all of it. */
	u32 is_steal_exact;
	u32 _unused;
	struct merged_part merged[MERGED_PARTS];
	struct interval intervals[WINDOW_INTERVALS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space sets it to the number of CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct account);
} account_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space sets it to 1 << interval_bits for each CPU. */
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

/* Index of a CPU's request or move, of which there are fewer than intervals. */
static __always_inline u32 index_of_detail(const struct account *account, u32 cpu, u32 position)
{
	u32 bits = (account->interval_bits - INTERVALS_A_REQUEST_BITS) & 31;

	if (bits > MAX_REQUEST_BITS)
		bits = MAX_REQUEST_BITS;
	return (cpu << bits) | (position & ((1u << bits) - 1));
}

static __always_inline void describe_thread(struct interval *interval, const struct account *account)
{
	interval->handler = account->handler ? account->handler : account->cgroup;
	interval->id = own_namespace ? account->shown_tid : account->tid;
	interval->kind = account->handler ? OCCUPANT_WORK : account->kind;
	__builtin_memcpy(interval->name, account->name, sizeof(interval->name));
}

/* Fills in the current occupant. */
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
