/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Who woke whom, in which context, and how each thread came by its CPU and left it. A waking costs some
 * 100 ns, of which a clock read takes 20, and a switch 20 ns for the thread's entry and its system call.
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

/* Where `completed` has the request of which context, and `timers` the timer. */
enum {
	IN_SOFTIRQ = 0,
	IN_IRQ = 1,
};

enum {
	KNOWN_TIMERS = 16,
};

/* Functions of timers whose purpose is known; 0 behind the last one, and for those that this kernel lacks. */
const volatile u64 known_timers[KNOWN_TIMERS] = {};

/* include/linux/sched.h */
enum {
	PF_KTHREAD = 0x200000,
	/* A thread that the kernel runs for a process (6.4), such as those of vhost. */
	PF_USER_WORKER = 0x4000,
	/* It is ending (5.16). */
	PF_POSTCOREDUMP = 0x8,
	TASK_UNINTERRUPTIBLE = 0x2,
	TASK_DEAD = 0x80,
	TASK_NOLOAD = 0x400,
	TASK_FREEZABLE = 0x2000,
};

/* Idle CPUs do in their own context what they would have been interrupted for. */
static __always_inline bool is_idle(void)
{
	return !bpf_get_current_task_btf()->pid;
}

static __always_inline bool is_in_irq(const struct account *account)
{
	return account->in_irq || (!account->softirq && is_idle());
}

/* What the CPU's preemption count says of interrupts. */
static __always_inline u32 interrupts_of(struct account *account)
{
	const struct task_struct *current = bpf_get_current_task_btf();

	if (!has_count_in_thread(current) && !account->preempt_count)
		account->preempt_count = preempt_count_here(current);
	return interrupts_in(current, account->preempt_count);
}

/*
 * Whether an interrupt runs that the account has not seen begin: one without a tracepoint, or one that came in while a
 * program of the account was running. It may have interrupted a softirq.
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

/* A net softirq that a thread has raised hands over what that thread sends to this machine itself. */
static __always_inline u32 net_raiser_here(const struct account *account)
{
	return is_of_network(account) ? account->net_raisers[(account->softirq - 1) & 1] : 0;
}

/* The number of a timer's function among those that are known, from 1 on. Global: the verifier looks at it once. */
__noinline int known_timer(u64 function)
{
	for (u32 i = 0; i < KNOWN_TIMERS; i++) {
		if (function && known_timers[i] == function)
			return i + 1;
	}
	return 0;
}

/* The timer that expires here. */
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

/* A thread that is to sleep as it had dirtied many pages, and how often it had left a CPU by then. */
struct throttled_writer {
	u32 tid;
	u32 switches;
};

/* By the thread's number; another one may take an entry over. */
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

/* It has slept once since then, as it does for no disk. */
static __always_inline bool is_throttled_writer(const struct task_struct *task)
{
	const struct throttled_writer *writer;

	if (!BPF_CORE_READ_BITFIELD(task, in_iowait))
		return false;
	writer = throttled_writer_of(task);
	return writer && writer->tid == (u32)task->pid && switches_before(task) - writer->switches <= 1;
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

/* A thread that does a device's interrupt: with PREEMPT_RT, threadirqs, or where the driver wants it. */
static __always_inline bool is_of_irq(const struct task_struct *task)
{
	return task->flags & PF_KTHREAD && begins_with(task->comm, "irq/", 4);
}

/*
 * Interrupts wake their own threads and those of softirqs after their handlers (kernel/irq/handle.c), as if the thread
 * did that they have interrupted.
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
	/* Without an event of that interrupt's end, the mark may be an old one. */
	if (account->in_timer && (account->in_irq || timer_is_unannounced))
		return ENTRY_TIMER;
	if (account->in_irq && account->irq_kind == OCCUPANT_VECTOR && account->irq_id == VECTOR_LOCAL_TIMER)
		return ENTRY_TIMER;
	return ENTRY_IRQ;
}

/*
 * Who wakes a thread or queues an item here, by what the CPU is doing: the thread that an interrupt has interrupted does
 * neither. Where the CPU's preemption count says that there is an interrupt, and no event has named it, the actor is unseen.
 */
static __always_inline enum entry_kind kind_here(struct account *account)
{
	/* An interrupt has come in while a program of the account is at work, or that was preempted. */
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

	/* The last CPU of an expedited grace period reports in the interrupt that has asked it to. */
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

/* At the waking of a thread that is asleep, or about to be. */
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
	/* It is in its former state still. */
	wakeup->stopper = is_new ? STOPPED_NOT : stopper_of(task, task->__state);
	if (kind == ENTRY_THREAD && account->softirq) {
		wakeup->waker_tid = net_raiser_here(account);
		__builtin_memset(wakeup->waker, 0, sizeof(wakeup->waker));
	}
	if (kind == ENTRY_DISK)
		wakeup->completed = account->completed[is_in_irq(account)] - 1;
	if (kind == ENTRY_TIMER)
		wakeup->timer = is_throttled_writer(task) ? DIRTY_THROTTLING : timer_here(account);
}

/*
 * A time in one byte, rounded up by a thirty-second at most: 5 bits, of which the first is left out, times a power of two,
 * in units of 262,144 ns. Up to 1.05 s, and a period of a quota has at most one second.
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

/* For how long it was throttled from then on, when its wait began so. */
static __noinline u8 throttled_from(struct task_struct *task, u64 since_ns)
{
	u64 filled_ns;

	if (!task || !may_be_throttled(task))
		return 0;
	filled_ns = cpu_quota_filled_ns(task, since_ns);
	return filled_ns > since_ns ? short_of_ns(filled_ns - since_ns) : 0;
}

/* Moves of threads that could run, before they got the CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as `requests_by_position`. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct run_queue_move);
} moves_by_position SEC(".maps");

/* Of the interval that is written next. */
static __always_inline void tell_move(struct account *account, u32 cpu, const struct wakeup *wakeup)
{
	u32 index = index_of_detail(account, cpu, account->written);
	struct run_queue_move *move = bpf_map_lookup_elem(&moves_by_position, &index);

	if (!move)
		return;
	store_in_order(&move->position, ~account->written);
	barrier();
	move->at_ns = wakeup->moved_ns;
	move->from_cpu = wakeup->moved_from;
	store_in_order(&move->position, account->written);
	account->entry.kind |= ENTRY_MOVED;
}

/*
 * Whether a waking that was kept one switch_out ago came while the thread was leaving its CPU. Otherwise it has had the CPU
 * since, and the waking that has ended its present wait was not seen. At a switch_in, the stamp is that of the one before.
 */
static __always_inline bool was_leaving(const struct task_struct *task, const struct wakeup *wakeup, u64 now_ns)
{
	u64 off_cpu_ns = task_off_cpu_ns(task);

	return off_cpu_ns > now_ns || wakeup->waits_since_ns > now_ns - off_cpu_ns;
}

/*
 * How a thread comes by the CPU from now on; it has left one `switches` times. A waking that came while it was leaving its CPU
 * was kept before that was counted.
 */
static __always_inline void tell_entry(struct account *account, u32 cpu, struct task_struct *task, u32 switches, bool is_switch_in)
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
	if (wakeup->throttled_by == THROTTLED_BY_QUOTA)
		entry->throttled = throttled_from(task, entry->woken_ns);
	if (__builtin_expect(was_moved(wakeup), 0) && wakeup->moved_from != cpu)
		tell_move(account, cpu, wakeup);
	if (wakeup->entry == ENTRY_PREEMPTED)
		return;
	entry->kind |= wakeup->stopper << ENTRY_STOPPED_SHIFT;
	if (wakeup->entry == ENTRY_DISK)
		entry->waker = wakeup->completed;
	else
		entry->waker = wakeup->entry == ENTRY_TIMER ? wakeup->timer : wakeup->waker_tid;
	entry->waker_cpu = wakeup->waker_cpu;
	barrier();
	/* Another thread took its place over. */
	if (wakeup->tid != (u32)task->pid) {
		__builtin_memset(entry, 0, sizeof(*entry));
		entry->kind = ENTRY_UNSEEN;
	}
}

/* The same of a thread whose switch_in was not seen. A waking since then is one of its next wait. */
static __always_inline void tell_unseen_entry(struct account *account, u32 cpu, struct task_struct *task, u32 switches)
{
	tell_entry(account, cpu, task, switches, false);
	if (account->entry.woken_ns > account->since_ns) {
		__builtin_memset(&account->entry, 0, sizeof(account->entry));
		account->entry.kind = ENTRY_UNSEEN;
	}
}

__noinline int tell_entry_of_current(struct account *account, u32 cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (account && keeps_all_wakeups)
		tell_unseen_entry(account, cpu, task, switches_before(task));
	return 0;
}

/* The number of the system call that the thread is in, plus one; 0 for none, or where that is not known. */
static __always_inline u32 syscall_to_tell(struct task_struct *task)
{
	s32 number = syscall_of(task);

	return number >= 0 && number < LEFT_SYSCALL ? number + 1 : 0;
}

/* Until the memory of its process is dumped, and then it ends: it is in no system call any more (coredump_task_exit()). */
static __always_inline bool waits_for_core_dump(const struct task_struct *task, u32 state)
{
	return task->flags & PF_POSTCOREDUMP && state & TASK_FREEZABLE;
}

static __always_inline u16 how_it_leaves(struct task_struct *task, bool preempt, u32 state)
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
		left |= syscall_to_tell(task);
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

/* It is another program from now on. Its number may be another one too: that of its process. */
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
			enter_thread(account, task);
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
	/* What a timer of TCP sends to this machine is delivered for it, and comes from no other machine. */
	if (account->softirq - 1 == SOFTIRQ_TIMER || account->softirq - 1 == SOFTIRQ_HRTIMER)
		account->net_timers[number & 1] = known_timer(account->timers[IN_SOFTIRQ]);
	/* A device's thread has not sent what comes in. */
	if (!account->softirq)
		account->net_raisers[number & 1] = is_of_irq(raiser) ? 0 : shown_number(raiser);
	return 0;
}

static __always_inline struct account *timer_begins(u64 function)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	/* What interrupts a program of the account is an interrupt, of which that has not seen the begin. */
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

/* Of low resolution: its softirq is announced, and tells nothing else. */
SEC("?tp_btf/timer_expire_entry")
int BPF_PROG(on_timer_expire_entry, struct timer_list *timer)
{
	timer_begins((u64)timer->function);
	return 0;
}
