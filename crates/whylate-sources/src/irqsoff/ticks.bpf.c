// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How late each CPU's timer interrupt is, and why: a handler, the hypervisor, or the function that enabled interrupts there. An interrupt
 * is not seen before it comes in: interrupts were off at least since the timer was due.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"
#include "window.bpf.h"
#include "irq_vectors.bpf.h"
#include "interrupted.bpf.h"
#include "steal.bpf.h"
#include "ticks.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct tick tick;
	struct late_tick late_tick;
	struct culprit culprit;
	struct culprit_key culprit_key;
	enum tick_found tick_found;
	enum tick_reason tick_reason;
	enum tick_limits tick_limits;
	enum irq_vector irq_vector;
	struct inside inside;
} layouts = {};

enum {
	/* Index of the flags among a perf event's registers, of 8 bytes each (arch/x86/include/uapi/asm/ptrace.h). */
	REGISTER_FLAGS = 18,
	FLAG_INTERRUPTS_ON = 1 << 9,
};

const volatile u64 timer_function = 0;
const volatile u64 period_ns = 0;
/* Minimum lateness; less does not count. */
const volatile u64 from_ns = 0;
/* Count all ticks, late or not. */
const volatile bool counts_all = false;
/* Late events carry a window of the account. */
const volatile bool with_causes = false;
/* Stacks are taken inside sections. */
const volatile bool looks_inside = false;
/* Distance of a CPU's `steal_time` from its `hrtimer_bases`; 0 where the kernel has none. */
const volatile s64 steal_time_distance = 0;
/* Elements of culprit_by_id that are used; a test sets fewer. */
const volatile u32 culprit_limit = MAX_CULPRITS;
/* Take stacks only with interrupts off. Cleared only by a test that has no NMI. */
const volatile bool proves_inside = true;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct tick);
} tick_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CULPRITS);
	__type(key, struct culprit_key);
	__type(value, u32);
} culprit_id_by_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_CULPRITS);
	__type(key, u32);
	__type(value, struct culprit);
} culprit_by_id SEC(".maps");

/* Too large for the stack; its program does not interrupt itself. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct late_tick);
} late_tick_to_send SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	/* User space makes it larger if causes are requested. */
	__uint(max_entries, 1 << 21);
} late_ticks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct inside);
} inside_by_cpu SEC(".maps");

static __always_inline struct tick *tick_here(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&tick_by_cpu, &cpu);
}

static __always_inline int handler_begins(u32 kind, u64 id, const char *name)
{
	struct tick *tick = tick_here();

	if (!tick)
		return 0;
	tick->handler_since_ns = bpf_ktime_get_ns();
	tick->handler.kind = kind;
	tick->handler.id = id;
	tick->longest_callback_ns = 0;
	if (name)
		bpf_probe_read_kernel_str(tick->handler.name, sizeof(tick->handler.name), name);
	return 0;
}

/* Names the hrtimer function that took most of a timer's interrupt, if one did. */
static __always_inline void name_callback(struct tick *tick, struct handler *handler, u64 ran_ns)
{
	if (tick->longest_callback_ns * 2 > ran_ns) {
		handler->kind = REASON_CALLBACK;
		handler->id = tick->longest_callback;
	}
}

static __always_inline void read_steal_clock(struct tick *tick, u64 now_ns)
{
	u64 exact_ns = exact_steal_ns(steal_time_distance && tick->timer_bases ? tick->timer_bases + steal_time_distance : 0);

	tick->is_steal_exact = exact_ns != 0;
	tick->steal_ns = exact_ns ? exact_ns : steal_ns_of_queue(cfs_queue_of(untrusted(struct task_struct, bpf_get_current_task_btf())));
	tick->steal_read_ns = now_ns;
}

/*
 * Splits the steal time between two readings: what may predate the timer's due time, or follow its interrupt, has not surely made it late.
 * A run queue's clock may be a tick older than its reading.
 */
static __always_inline void split_steal(const struct tick *tick, struct late_tick *late, u64 stolen_ns, u64 read_before_ns)
{
	u64 late_ns = since(late->came_ns, late->due_ns);
	u64 outside_ns = since(late->due_ns, read_before_ns) + since(tick->steal_read_ns, late->came_ns);

	late->steal_ns = tick->is_steal_exact ? since(stolen_ns, outside_ns) : 0;
	if (late->steal_ns > late_ns)
		late->steal_ns = late_ns;
	late->perhaps_stolen_ns = (stolen_ns < late_ns ? stolen_ns : late_ns) - late->steal_ns;
}

/* Handlers run with interrupts off: their time after the timer is due makes it late. */
static __always_inline int handler_ends(void)
{
	struct tick *tick = tick_here();
	u64 now_ns, ran_ns, late_ns;

	if (!tick || !tick->handler_since_ns)
		return 0;
	now_ns = bpf_ktime_get_ns();
	late_ns = tick->due_ns ? since(now_ns, tick->due_ns) : 0;
	ran_ns = since(now_ns, tick->handler_since_ns);
	tick->handler_since_ns = 0;
	if (!late_ns) {
		read_steal_clock(tick, now_ns);
		return 0;
	}
	if (ran_ns < late_ns)
		late_ns = ran_ns;
	tick->handlers_ns += late_ns;
	if (late_ns > tick->longest_ns) {
		tick->longest_ns = late_ns;
		__builtin_memcpy(&tick->longest, &tick->handler, sizeof(tick->longest));
		name_callback(tick, &tick->longest, ran_ns);
	}
	return 0;
}

SEC("tp_btf/irq_handler_entry")
int BPF_PROG(on_irq_handler_entry, int irq, struct irqaction *action)
{
	return handler_begins(REASON_DEVICE_IRQ, irq, action->name);
}

SEC("tp_btf/irq_handler_exit")
int BPF_PROG(on_irq_handler_exit)
{
	return handler_ends();
}

SEC("raw_tp")
int BPF_PROG(on_irq_vector_entry, int vector)
{
	return handler_begins(REASON_VECTOR, vector_of(vector), NULL);
}

SEC("raw_tp")
int BPF_PROG(on_irq_vector_exit)
{
	return handler_ends();
}

/* arm64: the reason is a text, such as "Rescheduling interrupts". */
SEC("?tp_btf/ipi_entry")
int BPF_PROG(on_ipi_entry, const char *reason)
{
	return handler_begins(REASON_VECTOR, VECTOR_NAMED, reason);
}

SEC("?tp_btf/ipi_exit")
int BPF_PROG(on_ipi_exit)
{
	return handler_ends();
}

/* Tests whether it is the timer of this CPU's perf event. */
static __always_inline bool is_tick(struct tick *tick, const struct hrtimer *timer)
{
	const struct perf_event *event;

	if ((u64)timer->function != timer_function)
		return false;
	if (tick->timer == (u64)timer)
		return true;
	if (!tick->event_id)
		return false;
	event = (const void *)timer - bpf_core_field_offset(struct perf_event, hw.hrtimer);
	if (BPF_CORE_READ(event, id) != tick->event_id)
		return false;
	tick->timer = (u64)timer;
	tick->timer_bases = timer_bases_here(timer);
	return true;
}

static __always_inline u32 find_interrupted(const struct tick *tick)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (user_is_interrupted(tick->timer_bases))
		return FOUND_USER;
	return task->pid ? FOUND_KERNEL : FOUND_IDLE;
}

/*
 * Finds what made the tick late: what took at least half of the time not surely stolen. User code has interrupts on, so steal time there
 * was not before the timer was due.
 */
static __always_inline void find_reason(struct tick *tick, struct late_tick *late)
{
	u64 late_ns = since(late->came_ns, late->due_ns);
	u64 most_ns = late->steal_ns + late->perhaps_stolen_ns;

	late->key.reason = REASON_NONE;
	late->key.id = 0;
	if (late->key.found == FOUND_USER && most_ns * 2 > late_ns) {
		late->key.reason = REASON_STEAL;
	} else if (most_ns + from_ns > late_ns) {
		late->key.reason = late->steal_ns * 2 > late_ns ? REASON_STEAL : REASON_PERHAPS_STEAL;
	} else if (late->handlers_ns * 2 >= late_ns - most_ns) {
		late->key.reason = tick->longest.kind;
		late->key.id = tick->longest.id;
		__builtin_memcpy(late->name, tick->longest.name, sizeof(late->name));
	}
}

static __always_inline bool has_key(const struct culprit *culprit, const struct culprit_key *key)
{
	return culprit->key.id == key->id && culprit->key.stack == key->stack && culprit->key.found == key->found &&
	       culprit->key.reason == key->reason;
}

/* The order of the steps is that of elements.bpf.h. */
static __noinline struct culprit *new_culprit(const struct late_tick *late)
{
	u32 id = take_element(&culprit_by_id, culprit_limit), *known;
	struct culprit *culprit = bpf_map_lookup_elem(&culprit_by_id, &id);

	if (!id || !culprit)
		return NULL;
	culprit->key = late->key;
	__builtin_memcpy(culprit->name, late->name, sizeof(culprit->name));
	__builtin_memcpy(&culprit->stack, &late->stack, sizeof(culprit->stack));
	if (!late->key.stack)
		culprit->stack.bytes = 0;
	if (!bpf_map_update_elem(&culprit_id_by_key, &late->key, &id, BPF_NOEXIST)) {
		store_in_order(&culprit->state, ELEMENT_COUNTS);
		return culprit;
	}
	/* Another CPU was faster. */
	__builtin_memset(&culprit->key, 0, sizeof(culprit->key));
	return_element(&culprit_by_id, id);
	known = bpf_map_lookup_elem(&culprit_id_by_key, &late->key);
	culprit = known ? bpf_map_lookup_elem(&culprit_by_id, known) : NULL;
	return culprit && has_key(culprit, &late->key) ? culprit : NULL;
}

static __always_inline void count(struct tick *tick, const struct late_tick *late)
{
	u32 *known = bpf_map_lookup_elem(&culprit_id_by_key, &late->key);
	struct culprit *culprit = known ? bpf_map_lookup_elem(&culprit_by_id, known) : NULL;

	if (!culprit || !has_key(culprit, &late->key))
		culprit = new_culprit(late);
	if (!culprit)
		tick->lost_culprits++;
	else if (!distribution_add(&culprit->length, since(late->came_ns, late->due_ns), true))
		tick->lost_buckets++;
}

static __always_inline struct inside *inside_here(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&inside_by_cpu, &cpu);
}

/*
 * Runs in an NMI, which disabled interrupts do not hold up. It may interrupt the other programs. They do not change its record, and read it
 * only once it has their tick's due time, after which it is not written again.
 */
SEC("?perf_event")
int on_kernel_cycles(void *ctx)
{
	struct tick *tick = tick_here();
	struct inside *inside = inside_here();
	u64 now_ns, due_ns;

	if (!tick || !inside)
		return 0;
	now_ns = bpf_ktime_get_ns();
	due_ns = *(volatile u64 *)&tick->due_ns;
	if (!due_ns || inside->due_ns == due_ns || since(now_ns, due_ns) < from_ns)
		return 0;
	/* Handlers have interrupts off as well: one that came in after the timer was due came after the section. */
	if (proves_inside && ((((const u64 *)ctx)[REGISTER_FLAGS] & FLAG_INTERRUPTS_ON) || tick->handler_since_ns > due_ns))
		return 0;
	inside->stack.bytes = bpf_get_stack(ctx, inside->stack.frames, sizeof(inside->stack.frames), 0);
	/* The CPU runs user code. */
	if (inside->stack.bytes <= 0)
		return 0;
	inside->at_ns = now_ns;
	barrier();
	*(volatile u64 *)&inside->due_ns = due_ns;
	return 0;
}

static __always_inline void add_inside_stack(struct late_tick *late)
{
	struct inside *inside;

	late->inside.bytes = 0;
	if (!looks_inside)
		return;
	inside = inside_here();
	if (!inside || *(volatile u64 *)&inside->due_ns != late->due_ns)
		return;
	barrier();
	/* The sample may have come in between the end of the section and the timer's handler. */
	if (!proves_inside || inside->at_ns < late->came_ns)
		__builtin_memcpy(&late->inside, &inside->stack, sizeof(late->inside));
}

static __always_inline void send(struct tick *tick, struct late_tick *late)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 size = __builtin_offsetof(struct late_tick, inside);
	u64 late_ns = since(late->came_ns, late->due_ns);
	u32 intervals;

	if (with_causes && !may_explain(&late_ticks, sizeof(*late), late_ns, late->came_ns))
		return;
	late->inside.bytes = 0;
	/* Neither steal time nor late interrupts in user code are in a section. */
	if (late->key.reason != REASON_STEAL && late->key.reason != REASON_PERHAPS_STEAL && late->key.found != FOUND_USER)
		add_inside_stack(late);
	if (late->inside.bytes > 0)
		size = __builtin_offsetof(struct late_tick, window);
	late->cpu = bpf_get_smp_processor_id();
	late->tid = shown_number(task);
	__builtin_memcpy(late->comm, task->comm, sizeof(late->comm));
	if (with_causes) {
		intervals = copy_window(&late->window, late->due_ns, late->came_ns);
		if (intervals > WINDOW_INTERVALS)
			intervals = WINDOW_INTERVALS;
		size = sizeof(*late) - (WINDOW_INTERVALS - intervals) * sizeof(struct interval);
	}
	if (size > sizeof(*late))
		return;
	if (with_causes)
		send_explained(&late_ticks, late, size, late_ns);
	else if (bpf_ringbuf_output(&late_ticks, late, size, 0))
		tick->lost_late_events++;
}

static __always_inline struct late_tick *late_tick_here(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&late_tick_to_send, &zero);
}

/* Returns 0 only without a stack. 64 bits distinguish the stacks of a table of some thousands. */
static __always_inline u64 hash_of_stack(const struct interrupted_stack *stack)
{
	u64 hash = stack->bytes;

	if (stack->bytes <= 0)
		return 0;
	for (u32 frame = 0; frame < STACK_FRAMES && frame * (s64)sizeof(u64) < stack->bytes; frame++) {
		hash = (hash ^ stack->frames[frame]) * 0x9E3779B97F4A7C15ull;
		hash ^= hash >> 32;
	}
	return hash | 1;
}

/* Global, so that the verifier checks it once. */
__noinline int tick_is_late(struct tick *tick, u64 came_ns, u64 stolen_ns, u64 read_before_ns)
{
	struct late_tick *late = late_tick_here();
	u64 late_ns;

	if (!tick || !late)
		return 0;
	late->due_ns = tick->due_ns;
	late->came_ns = came_ns;
	late->delivery_ns = tick->delivery_ns;
	late_ns = since(came_ns, tick->due_ns);
	split_steal(tick, late, stolen_ns, read_before_ns);
	late->handlers_ns = tick->handlers_ns < late_ns ? tick->handlers_ns : late_ns;
	__builtin_memset(late->name, 0, sizeof(late->name));
	late->key.found = find_interrupted(tick);
	late->key.stack = hash_of_stack(&late->stack);
	late->key._unused = 0;
	find_reason(tick, late);
	if (late_ns >= tick->send_from_ns)
		send(tick, late);
	/* The stack is irrelevant then; an idle state is named by its stack. */
	if ((late->key.reason != REASON_NONE && late->key.reason != REASON_PERHAPS_STEAL) || late->key.found == FOUND_USER) {
		late->key.stack = 0;
		late->key.found = late->key.reason == REASON_NONE || late->key.reason == REASON_PERHAPS_STEAL ? FOUND_USER : FOUND_KERNEL;
	}
	count(tick, late);
	return 0;
}

/* The tick became due in the handler that calls it: the functions before it made it late. */
static __always_inline void blame_current_handler(struct tick *tick, u64 now_ns)
{
	tick->handlers_ns = since(now_ns, tick->due_ns);
	tick->longest_ns = tick->handlers_ns;
	__builtin_memcpy(&tick->longest, &tick->handler, sizeof(tick->longest));
	name_callback(tick, &tick->longest, since(now_ns, tick->handler_since_ns));
}

/*
 * Learns how long it takes to deliver an interrupt until the program sees it: some hundred ns, in a virtual machine some thousand. A length
 * too short by as much is still a lower bound. Estimates the 7/8 quantile in steps; those up are seven times as long as those down.
 */
static __always_inline void learn_delivery(struct tick *tick, u64 late_ns)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 delivery_ns = tick->delivery_ns, step_ns = delivery_ns / 64 + 8;

	/* Idle CPUs wake up first. */
	if (late_ns >= from_ns || !task->pid)
		return;
	if (!delivery_ns)
		tick->delivery_ns = late_ns;
	else if (late_ns > delivery_ns)
		tick->delivery_ns = delivery_ns + 7 * step_ns;
	else if (late_ns < delivery_ns)
		tick->delivery_ns = delivery_ns > step_ns ? delivery_ns - step_ns : 1;
}

/* A separate function, as it is rarely needed. */
__noinline int count_tick(struct tick *tick, u64 late_ns)
{
	if (!tick || !period_ns)
		return 0;
	tick->overruns += late_ns / period_ns;
	if (!distribution_add(&tick->lateness, late_ns, true))
		tick->lost_buckets++;
	return 0;
}

static __always_inline void tick_comes(void *ctx, struct tick *tick, u64 due_ns, u64 now_ns)
{
	u64 read_before_ns = tick->steal_read_ns, stolen_ns, steal_before_ns = tick->steal_ns, came_ns = now_ns;
	struct late_tick *late;

	if (tick->due_ns && due_ns > tick->due_ns)
		tick->unseen += (due_ns - tick->due_ns) / period_ns;
	read_steal_clock(tick, now_ns);
	/* Before the first tick, nothing is known. */
	stolen_ns = tick->due_ns ? since(tick->steal_ns, steal_before_ns) : 0;
	tick->due_ns = due_ns;
	tick->ticks++;
	if (counts_all)
		count_tick(tick, since(now_ns, due_ns));
	if (tick->handler_since_ns > due_ns) {
		came_ns = tick->handler_since_ns;
		learn_delivery(tick, came_ns - due_ns);
		came_ns -= tick->delivery_ns;
	} else if (tick->handler_since_ns && since(now_ns, due_ns) >= from_ns) {
		blame_current_handler(tick, now_ns);
	}
	if (since(came_ns, due_ns) < from_ns)
		return;
	late = late_tick_here();
	if (!late)
		return;
	late->stack.bytes = bpf_get_stack(ctx, late->stack.frames, sizeof(late->stack.frames), 0);
	if (late->stack.bytes <= 0)
		tick->lost_stacks++;
	tick_is_late(tick, came_ns, stolen_ns, read_before_ns);
}

SEC("tp_btf/hrtimer_expire_entry")
int BPF_PROG(on_hrtimer_expire_entry, struct hrtimer *timer)
{
	struct tick *tick = tick_here();
	u64 now_ns;

	if (!tick)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (is_tick(tick, timer))
		tick_comes(ctx, tick, timer->node.expires, now_ns);
	/* Those in softirqs run with interrupts on. */
	if (!tick->handler_since_ns)
		return 0;
	tick->callback_since_ns = now_ns;
	tick->callback = (u64)timer->function;
	return 0;
}

SEC("tp_btf/hrtimer_expire_exit")
int BPF_PROG(on_hrtimer_expire_exit, struct hrtimer *timer)
{
	struct tick *tick = tick_here();
	u64 ran_ns;

	if (!tick)
		return 0;
	if (tick->timer == (u64)timer) {
		/* Its function has rearmed it. */
		tick->due_ns = timer->node.expires;
		tick->handlers_ns = 0;
		tick->longest_ns = 0;
	}
	if (!tick->handler_since_ns || !tick->callback_since_ns)
		return 0;
	ran_ns = since(bpf_ktime_get_ns(), tick->callback_since_ns);
	tick->callback_since_ns = 0;
	if (ran_ns > tick->longest_callback_ns) {
		tick->longest_callback_ns = ran_ns;
		tick->longest_callback = tick->callback;
	}
	return 0;
}
