#!/usr/bin/env bash
# An environment with torch-npu 2.13.0 for a machine without Ascend:   environment.sh FOLDER
# torch-npu loads libraries of CANN. Empty ones stand for them here, and one that has every symbol they lack: each a
# function that returns 0. So operators can be called on meta tensors, and nothing else. Needs Linux on x86-64, gcc and binutils.
# Afterwards:   LD_LIBRARY_PATH=FOLDER/stub TORCH_DEVICE_BACKEND_AUTOLOAD=0 FOLDER/venv/bin/python -m benchmarks.npu.check ..
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
stub=$dir/stub
[ ! -e "$dir/is-ready" ] || exit 0
mkdir -p "$stub"
"${PYTHON:-python3}" -m venv --clear "$dir/venv"
pip=("$dir/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install torch==2.13.0 numpy pyyaml msgspec
"${pip[@]}" install --no-deps torch-npu==2.13.0
site=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
libs=("$site"/torch_npu/lib/*.so "$site"/torch_npu/_C*.so)

missing() { # libraries that are not on this machine
  for lib in "${libs[@]}"; do
    LD_LIBRARY_PATH=$site/torch/lib:$site/torch_npu/lib ldd "$lib" 2>/dev/null | awk '/not found/ {print $1}'
  done | sort -u
}
symbols() { # names that files define or want, without versions: symbols --defined-only FILE..
  for file in "${@:2}"; do nm -D "$1" "$file" 2>/dev/null || true; done | awk '{print $NF}' | sed 's/@.*//' | sort -u
}

for lib in $(missing); do
  echo | gcc -shared -x c - -o "$stub/$lib" -Wl,-soname,"$lib"
done
python=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
symbols --undefined-only "${libs[@]}" >"$stub/wanted"
symbols --defined-only "${libs[@]}" "$site"/torch/lib/*.so "$(readlink -f "$dir/venv/bin/python")" "$python"/libpython3*.so* \
  /lib/*-linux-gnu/lib{c,m,stdc++,gcc_s,pthread,dl,rt}.so.* >"$stub/there"
{
  echo '.section .note.GNU-stack,"",@progbits'
  echo .text
  comm -23 "$stub/wanted" "$stub/there" | grep -vE '^(__gmon_start__|__cxa_finalize|_ITM_.*|__tls_get_addr)$' |
    awk '{printf ".globl \"%s\"\n.type \"%s\",@function\n\"%s\": xorl %%eax,%%eax\nret\n", $1, $1, $1}'
} >"$stub/symbols.s"
gcc -shared -o "$stub/libascendcl.so" "$stub/symbols.s" -Wl,-soname,libascendcl.so
touch "$dir/is-ready"
