#!/usr/bin/env bash
# Builds check_products and runs it on an emulated processor that has AMX, without such a machine: Bochs boots Linux,
# whose first process (emulated_init.cpp) runs check_products. It takes some minutes.
#
# usage: tools/check_amx.sh [BUILD_FOLDER]
#
# BOCHS    Bochs 3.0 with AMX, by default `bochs`; 3.1, as Debian builds it, divides wrongly
# BXSHARE  the folder with its BIOS-bochs-latest and VGABIOS-lgpl-latest, by default /usr/share/bochs
# KERNEL   Linux 6.15 or later, by default the newest /boot/vmlinuz-*
# ISA      the instruction set to check, by default amx
#
# On Debian 13: apt install bochs bochs-term cmake ninja-build g++ xorriso isolinux syslinux-common cpio, a kernel of
# trixie-backports (linux-image-cloud-amd64 boots soonest), and a Python that has the tests' packages (PATH=.venv/bin:$PATH).
#
# Bugs and gaps of Bochs 3.0, and how this check avoids them:
# - XFD is missing, with which a kernel enables the tile registers at their first use. Linux is told that the processor
#   has XFD (setcpuid=324). As a result Linux never saves the tiles: see emulated_init.cpp.
# - TDPBSSD and its variants take all bytes as unsigned: only products of bf16 can be checked.
# - VCVTNE2PS2BF16 rounds its second operand twice: the kernels round one vector at a time, which costs no more.
# - VPINSRB from memory with registers 16 to 31 reads from a wrong address. gcc uses it for vectorized straight-line code
#   (hence -fno-tree-slp-vectorize).
# - Code that Linux patches at boot may run unpatched (hence spectre_v2=retpoline, which patches less), and leaving system
#   management mode fails with five-level page tables (hence no5lvl).
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "check_amx: $1" >&2; exit 2; }
bochs=${BOCHS:-bochs} share=${BXSHARE:-/usr/share/bochs} isa=${ISA:-amx} build=${1:-build/amx}
kernel=${KERNEL:-$(ls -v /boot/vmlinuz-* 2> /dev/null | tail -1)}
isolinux=/usr/lib/ISOLINUX/isolinux.bin loader=/usr/lib/syslinux/modules/bios/ldlinux.c32
for tool in "$bochs" g++ cmake ninja python3 cpio xorriso; do
    command -v "$tool" > /dev/null || fail "$tool is missing"
done
for file in "$share/BIOS-bochs-latest" "$share/VGABIOS-lgpl-latest" "$isolinux" "$loader" "${kernel:-/boot/vmlinuz-*}"; do
    [ -e "$file" ] || fail "$file is missing"
done
models=$("$bochs" --help cpu 2>&1) || true
[[ $models == *sapphire_rapids* ]] || fail "$bochs emulates no AMX: 3.0 or later is needed"

cmake -G Ninja -S backends/slm_native/csrc -B "$build" -DSLM_CHECK=ON \
    -DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CXX_FLAGS=-fno-tree-slp-vectorize
cmake --build "$build"
machine=$build/machine
rm -rf "$machine"
mkdir -p "$machine/files/dev" "$machine/disc/isolinux"
g++ -std=c++20 -O2 -Wall -Wextra -static -o "$machine/files/init" tools/emulated_init.cpp
PYTHONPATH=.:tests python3 tests/kernel_cases.py "$machine/files/cases"
cp "$build/check_products" "$machine/files/"
(cd "$machine/files" && find . | cpio --quiet -o -H newc) > "$machine/disc/initrd"
cp "$kernel" "$machine/disc/kernel"
cp "$isolinux" "$loader" "$machine/disc/isolinux/"
cat > "$machine/disc/isolinux/isolinux.cfg" << END
default check
label check
  kernel /kernel
  append initrd=/initrd console=ttyS0,115200 loglevel=3 tsc=reliable lpj=1000000 random.trust_cpu=on spectre_v2=retpoline no5lvl setcpuid=324 -- /check_products /cases $isa
END
xorriso -as mkisofs -quiet -o "$machine/boot.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table "$machine/disc" 2> /dev/null
cat > "$machine/bochsrc" << END
cpu: model=sapphire_rapids, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=1024, host=1024
romimage: file=$share/BIOS-bochs-latest
vgaromimage: file=$share/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$machine/boot.iso, status=inserted
boot: cdrom
clock: sync=none
com1: enabled=1, mode=file, dev=$machine/console.log
display_library: rfb, options="timeout=0"
log: $machine/bochs.log
panic: action=fatal
END
: > "$machine/console.log"
# The status of Bochs is ignored: it reports a failure even if the machine was turned off.
timeout 1h "$bochs" -q -f "$machine/bochsrc" > "$machine/bochs.out" 2>&1 < /dev/null &
tail -n +1 --pid=$! -f "$machine/console.log" | tr -d '\r' | sed -u -n '/^-- started/,/^-- ended/p'
grep -q "^$isa: .* checked" "$machine/console.log" && grep -q '^-- ended with 0' "$machine/console.log"
