; The relay between GPUs that cannot write to one another's memory: copies words from outboxes to inboxes, a cache line
; at a time, as soon as all of a line's words have their round's number (runtime/exchange_layout.py).
;
; i64 relay(ptr job) copies until all rounds are done, or until it found nothing to do `patience` times in a row. It goes
; on where it was when it is called again. It takes a line of each outbox before the next line of any, as workgroups
; wait for one another. Returns the rounds that are left. job: int64[7 + 9 * outboxes]:
;   0 rounds left, 1 number of the round, 2 the next line, 3 the next outbox: where it is
;   4 outboxes, 5 lines of each in a round, 6 patience, 7 bytes of a slot, then for each outbox
;   0 address, 1 inboxes, 2.. their addresses
; Numbers are 1 .. 2^26 and again; odd ones use the second slot.

target triple = "x86_64-unknown-linux-gnu"

define i64 @relay(ptr noalias %job) nounwind {
entry:
  %number.at = getelementptr i64, ptr %job, i64 1
  %line.at = getelementptr i64, ptr %job, i64 2
  %outbox.at = getelementptr i64, ptr %job, i64 3
  %outboxes.at = getelementptr i64, ptr %job, i64 4
  %lines.at = getelementptr i64, ptr %job, i64 5
  %patience.at = getelementptr i64, ptr %job, i64 6
  %slot.at = getelementptr i64, ptr %job, i64 7
  %rounds.first = load i64, ptr %job
  %number.first = load i64, ptr %number.at
  %outbox.first = load i64, ptr %outbox.at
  %line.first = load i64, ptr %line.at
  %outboxes = load i64, ptr %outboxes.at
  %lines = load i64, ptr %lines.at
  %patience = load i64, ptr %patience.at
  %slot = load i64, ptr %slot.at
  br label %round

round:
  %rounds = phi i64 [ %rounds.first, %entry ], [ %rounds.less, %round.done ]
  %number = phi i64 [ %number.first, %entry ], [ %number.next, %round.done ]
  %outbox.begin = phi i64 [ %outbox.first, %entry ], [ 0, %round.done ]
  %line.begin = phi i64 [ %line.first, %entry ], [ 0, %round.done ]
  %more = icmp sgt i64 %rounds, 0
  br i1 %more, label %round.begin, label %end

round.begin:
  %parity = and i64 %number, 1
  %offset = mul i64 %parity, %slot
  %number32 = trunc i64 %number to i32
  %one.number = insertelement <8 x i32> poison, i32 %number32, i32 0
  %numbers = shufflevector <8 x i32> %one.number, <8 x i32> poison, <8 x i32> zeroinitializer
  br label %line

line:
  %l = phi i64 [ %line.begin, %round.begin ], [ %l.next, %line.done ]
  %outbox.here = phi i64 [ %outbox.begin, %round.begin ], [ 0, %line.done ]
  %place = shl i64 %l, 6
  br label %outbox

outbox:
  %o = phi i64 [ %outbox.here, %line ], [ %o.next, %outbox.done ]
  %entry.words = mul i64 %o, 9
  %entry.word = add i64 %entry.words, 8
  %source.at = getelementptr i64, ptr %job, i64 %entry.word
  %inboxes.at = getelementptr i64, ptr %source.at, i64 1
  %targets = getelementptr i64, ptr %source.at, i64 2
  %source.box = load ptr, ptr %source.at
  %inboxes = load i64, ptr %inboxes.at
  %source = getelementptr i8, ptr %source.box, i64 %offset
  %from = getelementptr i8, ptr %source, i64 %place
  br label %poll

poll:
  %idle = phi i64 [ 0, %outbox ], [ %idle.next, %wait ]
  %words = load volatile <16 x i32>, ptr %from, align 64
  %found = shufflevector <16 x i32> %words, <16 x i32> poison, <8 x i32> <i32 1, i32 3, i32 5, i32 7, i32 9, i32 11, i32 13, i32 15>
  %same = icmp eq <8 x i32> %found, %numbers
  %all = call i1 @llvm.vector.reduce.and.v8i1(<8 x i1> %same)
  br i1 %all, label %copies, label %wait

wait:
  call void @llvm.x86.sse2.pause()
  %idle.next = add i64 %idle, 1
  %enough = icmp sge i64 %idle.next, %patience
  br i1 %enough, label %suspend, label %poll

copies:
  %t = phi i64 [ 0, %poll ], [ %t.next, %copies ]
  %target.at = getelementptr i64, ptr %targets, i64 %t
  %target.box = load ptr, ptr %target.at
  %target = getelementptr i8, ptr %target.box, i64 %offset
  %to = getelementptr i8, ptr %target, i64 %place
  store <16 x i32> %words, ptr %to, align 64, !nontemporal !0
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %inboxes
  br i1 %t.more, label %copies, label %outbox.done

outbox.done:
  %o.next = add i64 %o, 1
  %o.more = icmp slt i64 %o.next, %outboxes
  br i1 %o.more, label %outbox, label %line.done

line.done:
  %l.next = add i64 %l, 1
  %l.more = icmp slt i64 %l.next, %lines
  br i1 %l.more, label %line, label %round.done

round.done:
  call void @llvm.x86.sse.sfence()
  %rounds.less = sub i64 %rounds, 1
  %below = and i64 %number, 67108863
  %number.next = add i64 %below, 1
  br label %round

suspend:
  call void @llvm.x86.sse.sfence()
  br label %end

end:
  %o.end = phi i64 [ 0, %round ], [ %o, %suspend ]
  %l.end = phi i64 [ 0, %round ], [ %l, %suspend ]
  store i64 %rounds, ptr %job
  store i64 %number, ptr %number.at
  store i64 %o.end, ptr %outbox.at
  store i64 %l.end, ptr %line.at
  ret i64 %rounds
}

declare i1 @llvm.vector.reduce.and.v8i1(<8 x i1>)
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.sfence()

!0 = !{i32 1}
