/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Wakeup edges: waker and wakee, in which context, and how each thread was switched in and out. A wakeup costs some 100 ns, 20 ns of which
 * read the clock. A switch costs 20 ns for the thread's switch-in and its system call.
 */
#pragma once

#include "context.bpf.h"
#include "keep_wakeups.bpf.h"
#include "registers.bpf.h"
#include "stopped.bpf.h"

/* The timer's interrupt has no tracepoint (Hyper-V): those of the timers that it expires stand in. */
const volatile bool timer_is_unannounced = false;

/* include/linux/interrupt.h */
enum softirq {
	SOFTIRQ_TIMER = 1,
	SOFTIRQ_NET_TX = 2,
	SOFTIRQ_NET_RX = 3,
	SOFTIRQ_HRTIMER = 8,
	SOFTIRQ_RCU = 9,
};

/* Index of the context in `completed` (disk requests) and `timers`. */
enum {
	IN_SOFTIRQ = 0,
	IN_IRQ = 1,
};

enum {
	KNOWN_TIMERS = 16,
	/* The first of them: hrtimer_wakeup and process_timeout. */
	GENERIC_TIMERS = 2,
};

/* Functions of timers with a known purpose; 0 behind the last one, and for those that this kernel lacks. */
const volatile u64 known_timers[KNOWN_TIMERS] = {};

/* include/linux/sched.h */
enum {
	PF_KTHREAD = 0x200000,
	/* A kernel thread that runs for a process (6.4), such as those of vhost. */
	PF_USER_WORKER = 0x4000,
	/* The thread is exiting (5.16). */
	PF_POSTCOREDUMP = 0x8,
	TASK_UNINTERRUPTIBLE = 0x2,
	TASK_DEAD = 0x80,
	TASK_NOLOAD = 0x400,
	TASK_FREEZABLE = 0x2000,
};

/* An idle CPU does interrupt work in its own context. */
static __always_inline bool is_idle(void)
{
	return !bpf_get_current_task_btf()->pid;
}

static __always_inline bool is_in_irq(const struct account *account)
{
	return account->in_irq || (!account->softirq && is_idle());
}

/* Returns the interrupt bits of the CPU's preemption count. */
static __always_inline u32 interrupts_of(struct account *account)
{
	const struct task_struct *current = bpf_get_current_task_btf();

	if (!has_count_in_thread(current) && !account->preempt_count)
		account->preempt_count = preempt_count_here(untrusted(struct task_struct, current));
	return interrupts_in(current, account->preempt_count);
}

/*
 * Tests for an interrupt that the account has not seen start: one without a tracepoint, or one that came in during a program of the
 * account. It may have interrupted a softirq.
 */
static __always_inline bool in_unseen_interrupt(struct account *account)
{
	if (account->in_irq)
		return false;
	if (account->softirq)
		return interrupts_of(account) & IN_HARDIRQ;
	return interrupts_of(account) && !is_idle();
}

/* Before its first switch, the account has seen no interrupt. */
static __always_inline void count_unseen_interrupt(struct account *account)
{
	if (account->since_ns)
		__sync_fetch_and_add(&account->unseen_interrupts, 1);
}

static __always_inline bool is_of_network(const struct account *account)
{
	u32 number = account->softirq - 1;

	return number == SOFTIRQ_NET_TX || number == SOFTIRQ_NET_RX;
}

/* Returns the thread that raised the current net softirq, which delivers that thread's packets to this machine itself; 0 if none. */
static __always_inline u32 net_raiser_here(const struct account *account)
{
	return is_of_network(account) ? account->net_raisers[(account->softirq - 1) & 1] : 0;
}

/* Returns the 1-based index of a known timer function, or 0. Global, so that the verifier checks it once. */
__noinline int known_timer(u64 function)
{
	for (u32 i = 0; i < KNOWN_TIMERS; i++) {
		if (function && known_timers[i] == function)
			return i + 1;
	}
	return 0;
}

/* Returns the 1-based index of the timer function that runs here, or 0. */
static __always_inline u32 timer_here(const struct account *account)
{
	bool is_irq = is_in_irq(account) || account->is_busy;

	if (!is_irq && is_of_network(account))
		return account->net_timers[(account->softirq - 1) & 1];
	return known_timer(account->timers[is_irq]);
}

enum {
	THROTTLED_WRITERS = 256,
};

/* A thread about to be throttled for dirtying pages, and its number of switches by then. */
struct throttled_writer {
	u32 tid;
	u32 switches;
};

/* Indexed by a hash of the TID; another thread may take over an entry. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, THROTTLED_WRITERS);
	__type(key, u32);
	__type(value, struct throttled_writer);
} throttled_writers SEC(".maps");

static __always_inline struct throttled_writer *throttled_writer_of(const struct task_struct *task)
{
	u32 index = (u32)task->pid & (THROTTLED_WRITERS - 1);

	return bpf_map_lookup_elem(&throttled_writers, &index);
}

SEC("?tp_btf/balance_dirty_pages")
int BPF_PROG(on_balance_dirty_pages)
{
	const struct task_struct *task = bpf_get_current_task_btf();
	struct throttled_writer *writer = throttled_writer_of(task);

	if (!writer)
		return 0;
	writer->switches = switches_before(task);
	writer->tid = task->pid;
	return 0;
}

/* Tests whether the thread has slept at most once since balance_dirty_pages(), in I/O wait without a disk. */
static __always_inline bool is_throttled_writer(const struct task_struct *task)
{
	const struct throttled_writer *writer;

	if (!BPF_CORE_READ_BITFIELD(task, in_iowait))
		return false;
	writer = throttled_writer_of(task);
	return writer && writer->tid == (u32)task->pid && switches_before(task) - writer->switches <= 1;
}

/*
 * Tests whether the thread sleeps within psi_memstall_enter(): over its cgroup's memory.high, or in reclaim. Unknown without CONFIG_PSI, or
 * if PSI is off (psi=0).
 */
static __always_inline bool is_over_memory_limit(const struct task_struct *task)
{
	return bpf_core_field_exists(task->in_memstall) && task->__state & TASK_UNINTERRUPTIBLE && BPF_CORE_READ_BITFIELD(task, in_memstall);
}

/* Returns the number of the timer that wakes the thread: the special one of what throttled it, if something did. */
static __always_inline u32 timer_for(const struct account *account, const struct task_struct *task)
{
	u32 timer = timer_here(account);

	if (is_throttled_writer(task))
		return DIRTY_THROTTLING;
	/* The first two wake the thread that set them. Any other timer shows what throttled the thread, such as a disk limit during reclaim. */
	return timer <= GENERIC_TIMERS && is_over_memory_limit(task) ? MEMORY_LIMIT : timer;
}

static __always_inline enum entry_kind kind_in_softirq(const struct account *account)
{
	u32 number = account->softirq - 1;

	if (number == SOFTIRQ_TIMER)
		return ENTRY_TIMER;
	if (account->completed[IN_SOFTIRQ])
		return ENTRY_DISK;
	if (number == SOFTIRQ_HRTIMER)
		return ENTRY_TIMER;
	if (is_of_network(account)) {
		if (net_raiser_here(account))
			return ENTRY_THREAD;
		return account->net_timers[number & 1] ? ENTRY_TIMER : ENTRY_NETWORK;
	}
	return number == SOFTIRQ_RCU ? ENTRY_RCU : ENTRY_SOFTIRQ;
}

/* Tests for an interrupt thread: PREEMPT_RT, threadirqs, or the driver's choice. */
static __always_inline bool is_of_irq(const struct task_struct *task)
{
	return task->flags & PF_KTHREAD && begins_with(task->comm, "irq/", 4);
}

/*
 * Interrupts wake their own threads and those of softirqs after their handlers (kernel/irq/handle.c), so that the interrupted thread seems
 * to be the waker.
 */
static __always_inline enum entry_kind kind_by_woken(const struct task_struct *woken)
{
	if (!(woken->flags & PF_KTHREAD))
		return ENTRY_THREAD;
	if (is_of_irq(woken))
		return ENTRY_IRQ;
	if (begins_with(woken->comm, "ksoftirqd/", 10))
		return ENTRY_SOFTIRQ;
	return begins_with(woken->comm, "ktimers/", 8) ? ENTRY_TIMER : ENTRY_THREAD;
}

/* In an interrupt, or on an idle CPU. */
static __always_inline enum entry_kind kind_in_irq(const struct account *account)
{
	if (account->completed[IN_IRQ])
		return ENTRY_DISK;
	/* If the interrupt's end has no tracepoint, the mark may be stale. */
	if (account->in_timer && (account->in_irq || timer_is_unannounced))
		return ENTRY_TIMER;
	if (account->in_irq && account->irq_kind == OCCUPANT_VECTOR && account->irq_id == VECTOR_LOCAL_TIMER)
		return ENTRY_TIMER;
	return ENTRY_IRQ;
}

/*
 * Returns the kind of waker or queuer from what the CPU is doing: never the thread that an interrupt has interrupted. If the preemption
 * count shows an interrupt that no tracepoint has announced, the actor is unseen.
 */
static __always_inline enum entry_kind kind_here(struct account *account)
{
	/* An interrupt came in during a program of the account, or that program was preempted. */
	if (account->is_busy) {
		if (account->missed_switch)
			return ENTRY_UNSEEN;
		return account->in_timer ? ENTRY_TIMER : ENTRY_IRQ;
	}
	if (account->in_irq)
		return kind_in_irq(account);
	if (account->softirq) {
		if (!(interrupts_of(account) & IN_HARDIRQ))
			return kind_in_softirq(account);
	} else if (is_idle()) {
		return kind_in_irq(account);
	} else if (!interrupts_of(account) && !(account->in_timer && timer_is_unannounced)) {
		return ENTRY_THREAD;
	}
	return account->in_timer && timer_is_unannounced ? ENTRY_TIMER : ENTRY_UNSEEN;
}

static __always_inline enum entry_kind kind_of_waking(struct account *account, const struct task_struct *woken)
{
	enum entry_kind kind = kind_here(account), by_woken;

	/* The last CPU of an expedited grace period reports in the interrupt that asked for it. */
	if (kind == ENTRY_IRQ && woken->flags & PF_KTHREAD && begins_with(woken->comm, "rcu_", 4))
		return ENTRY_RCU;
	if (kind != ENTRY_UNSEEN && (kind != ENTRY_THREAD || account->softirq))
		return kind;
	by_woken = kind_by_woken(woken);
	if (by_woken != ENTRY_THREAD)
		return by_woken;
	if (kind == ENTRY_UNSEEN)
		count_unseen_interrupt(account);
	return kind;
}

/* Records the wakeup of a thread that sleeps or is about to. */
static __always_inline void keep_waking(const struct task_struct *task, bool is_new)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = account_of(cpu);
	const struct task_struct *waker = NULL;
	struct wakeup *wakeup;
	enum entry_kind kind;

	if (!account)
		return;
	if (is_new)
		kind = task->tgid == task->pid ? ENTRY_PARENT : ENTRY_PARENT_OF_THREAD;
	else
		kind = kind_of_waking(account, task);
	if (is_new || (kind == ENTRY_THREAD && !account->softirq))
		waker = bpf_get_current_task_btf();
	wakeup = keep_wait(task, true, waker, bpf_ktime_get_ns());
	if (!wakeup)
		return;
	wakeup->entry = kind;
	wakeup->waker_cpu = cpu;
	/* The thread is still in its former state. */
	wakeup->stopper = is_new ? STOPPED_NOT : stopper_of(task, task->__state);
	if (kind == ENTRY_THREAD && account->softirq) {
		wakeup->waker_tid = net_raiser_here(account);
		__builtin_memset(wakeup->waker, 0, sizeof(wakeup->waker));
	}
	if (kind == ENTRY_DISK)
		wakeup->completed = account->completed[is_in_irq(account)] - 1;
	if (kind == ENTRY_TIMER)
		wakeup->timer = timer_for(account, task);
}

/*
 * Encodes a time in one byte, rounded up by at most 1/32: a 5-bit mantissa with implicit leading bit times a power of two, in units of
 * 262,144 ns. Maximum 1.05 s; a quota's period is at most one second.
 */
static __always_inline u8 short_of_ns(u64 ns)
{
	u64 units = (ns + (1 << 18) - 1) >> 18;
	u32 doubled = 0;

	while (doubled < 6 && units >= 64) {
		units = (units + 1) >> 1;
		doubled++;
	}
	if (units >= 64)
		return 0xff;
	return units < 32 ? units : (doubled + 1) << 5 | (units - 32);
}

/*
 * Returns for how long a wait that started throttled stayed so, encoded by short_of_ns(). Global, so that the verifier follows its loops
 * once; a global function takes the thread by its address.
 */
__noinline int throttled_from(const u64 *address, u64 since_ns)
{
	const struct task_struct *task;
	u64 filled_ns;

	if (!address)
		return 0;
	task = (const struct task_struct *)*address;
	if (BPF_CORE_READ(task, prio) < 100)
		return 0;
	filled_ns = cpu_quota_filled_ns(task, since_ns);
	return filled_ns > since_ns ? short_of_ns(filled_ns - since_ns) : 0;
}

/* A runnable thread was moved from one run queue to another before it ran. */
struct run_queue_move {
	struct moves moves;
	/* The interval that it starts; a different number while being written. */
	u32 position;
	u32 _unused;
};

/* Migrations of runnable threads before they ran. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as `requests_by_position`. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct run_queue_move);
} moves_by_position SEC(".maps");

/* Records the migration for the interval that is written next. */
static __always_inline void record_move(struct account *account, u32 cpu, const struct wakeup *wakeup)
{
	u32 index = index_of_detail(account, cpu, account->written);
	struct run_queue_move *move = bpf_map_lookup_elem(&moves_by_position, &index);

	if (!move)
		return;
	store_in_order(&move->position, ~account->written);
	barrier();
	copy_moves(&move->moves, wakeup);
	store_in_order(&move->position, account->written);
	account->entry.kind |= ENTRY_MOVED;
}

/*
 * Tests whether a wakeup recorded one switch-out ago came while the thread was switching out. Otherwise it has run since, and the wakeup
 * that ended its current wait was not seen. At a switch-in, the scheduler's stamp is that of the previous switch-in.
 */
static __always_inline bool was_leaving(const struct task_struct *task, const struct wakeup *wakeup, u64 now_ns)
{
	u64 off_cpu_ns = task_off_cpu_ns(task);

	return off_cpu_ns > now_ns || wakeup->waits_since_ns > now_ns - off_cpu_ns;
}

/*
 * Records how a thread is switched in; `switches` is its number of switch-outs. A wakeup during a switch-out was recorded before that was
 * counted.
 */
static __always_inline void fill_entry(struct account *account, u32 cpu, struct task_struct *task, u32 switches, bool is_switch_in)
{
	struct entry *entry = &account->entry;
	const struct wakeup *wakeup;

	if (!task->pid)
		return;
	entry->kind = ENTRY_UNSEEN;
	wakeup = wakeup_of(task->pid, task->flags & PF_WQ_WORKER);
	if (!wakeup || wakeup->tid != (u32)task->pid || wakeup->born_us != born_us(task))
		return;
	switches -= wakeup->switches;
	if (switches > 1)
		return;
	if (switches && (!is_switch_in || wakeup->entry == ENTRY_PREEMPTED || !was_leaving(task, wakeup, account->since_ns)))
		return;
	entry->kind = wakeup->entry;
	entry->woken_ns = wakeup->waits_since_ns;
	if (wakeup->throttled_by == THROTTLED_BY_QUOTA) {
		u64 address = (u64)task;

		entry->throttled = throttled_from(&address, entry->woken_ns);
	}
	if (__builtin_expect(was_moved(wakeup), 0) && (wakeup->moved_from != cpu || wakeup->moves > 1))
		record_move(account, cpu, wakeup);
	if (wakeup->entry == ENTRY_PREEMPTED)
		return;
	entry->kind |= wakeup->stopper << ENTRY_STOPPED_SHIFT;
	if (wakeup->entry == ENTRY_DISK)
		entry->waker = wakeup->completed;
	else
		entry->waker = wakeup->entry == ENTRY_TIMER ? wakeup->timer : wakeup->waker_tid;
	entry->waker_cpu = wakeup->waker_cpu;
	barrier();
	/* Another thread took over the entry. */
	if (wakeup->tid != (u32)task->pid) {
		__builtin_memset(entry, 0, sizeof(*entry));
		entry->kind = ENTRY_UNSEEN;
	}
}

/* Like fill_entry() for a thread without a recorded switch-in. A later wakeup belongs to its next wait. */
static __always_inline void fill_unseen_entry(struct account *account, u32 cpu, struct task_struct *task, u32 switches)
{
	fill_entry(account, cpu, task, switches, false);
	if (account->entry.woken_ns > account->since_ns) {
		__builtin_memset(&account->entry, 0, sizeof(account->entry));
		account->entry.kind = ENTRY_UNSEEN;
	}
}

__noinline int fill_entry_of_current(struct account *account, u32 cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (account && keeps_all_wakeups)
		fill_unseen_entry(account, cpu, task, switches_before(task));
	return 0;
}

/* Returns the thread's system call number plus one; 0 for none or an unknown one. */
static __always_inline u32 syscall_plus_one(struct task_struct *task)
{
	s32 number = syscall_of(task);

	return number >= 0 && number < LEFT_SYSCALL ? number + 1 : 0;
}

/* Tests whether the thread waits for its process's core dump, after which it exits: it is in no system call (coredump_task_exit()). */
static __always_inline bool waits_for_core_dump(const struct task_struct *task, u32 state)
{
	return task->flags & PF_POSTCOREDUMP && state & TASK_FREEZABLE;
}

static __always_inline u16 switch_out_flags(struct task_struct *task, bool preempt, u32 state)
{
	u16 left = LEFT_BLOCKED;
	enum stopper stopper;

	if (!task->pid)
		return 0;
	if (preempt || !state)
		return LEFT_PREEMPTED;
	if (state & TASK_DEAD)
		return LEFT_DEAD;
	if (task->flags & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER))
		left |= LEFT_IS_KERNEL;
	else if (!waits_for_core_dump(task, state))
		left |= syscall_plus_one(task);
	stopper = stopper_of(task, state);
	if (stopper)
		return left | LEFT_STOPPED | stopper << LEFT_STOPPER_SHIFT;
	if (state & TASK_UNINTERRUPTIBLE && !(state & TASK_NOLOAD))
		left |= LEFT_UNINTERRUPTIBLE;
	if (BPF_CORE_READ_BITFIELD(task, in_iowait))
		left |= LEFT_IN_IOWAIT;
	return left;
}

SEC("?tp_btf/sched_wakeup_new")
int BPF_PROG(on_sched_wakeup_new, struct task_struct *task)
{
	keep_waking(task, true);
	return 0;
}

/* The thread executes another program from now on. Its TID may change to that of its process. */
SEC("?tp_btf/sched_process_exec")
int BPF_PROG(on_sched_process_exec, struct task_struct *task)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account;

	hold_cpu();
	account = open_account(cpu);
	if (account) {
		if (account->since_ns && !account->in_irq && !account->softirq) {
			end_interval_of_thread(account, cpu);
			enter_thread(account, task, cgroup_number_of(untrusted(struct task_struct, task)));
		}
		close_account(account);
	}
	let_cpu_go();
	return 0;
}

SEC("?tp_btf/softirq_raise")
int BPF_PROG(on_softirq_raise, unsigned int number)
{
	const struct task_struct *raiser = bpf_get_current_task_btf();
	struct account *account;

	if (number != SOFTIRQ_NET_TX && number != SOFTIRQ_NET_RX)
		return 0;
	account = account_of(bpf_get_smp_processor_id());
	if (!account || account->is_busy || is_in_irq(account) || in_unseen_interrupt(account))
		return 0;
	/* What a TCP timer sends to this machine is delivered on its behalf, and comes from no other machine. */
	if (account->softirq - 1 == SOFTIRQ_TIMER || account->softirq - 1 == SOFTIRQ_HRTIMER)
		account->net_timers[number & 1] = known_timer(account->timers[IN_SOFTIRQ]);
	/* An interrupt thread has not sent the packets that come in. */
	if (!account->softirq)
		account->net_raisers[number & 1] = is_of_irq(raiser) ? 0 : shown_number(raiser);
	return 0;
}

static __always_inline struct account *timer_begins(u64 function)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	/* A timer that interrupts a program of the account runs in an interrupt without a recorded start. */
	if (account)
		account->timers[is_in_irq(account) || account->is_busy] = function;
	return account;
}

static __always_inline void hrtimer_begins(u64 function)
{
	struct account *account = timer_begins(function);

	if (!account)
		return;
	account->in_timer = true;
	account->completed[is_in_irq(account)] = 0;
}

/* Low-resolution timers: their softirq has a tracepoint, so only the function is recorded. */
SEC("?tp_btf/timer_expire_entry")
int BPF_PROG(on_timer_expire_entry, struct timer_list *timer)
{
	timer_begins((u64)timer->function);
	return 0;
}
