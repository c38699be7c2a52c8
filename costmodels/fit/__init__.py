"""From measured points to a machine file.

A fit is a table of sections (`section`), one for devices (`device`, with `spreads`) and one for CPUs (`cpu`). A section
takes some of the points (`points`), fits a form to them (`forms`, `kernels`, `matrix`, `links`) and gives a part of the
machine file with its provenance. To fit something new, add a row to a table; what measures its points is a row of
`executor.calibrate.device_sections` or `executor.calibrate.cpu`.

* `predict`: predictions of the fitted forms for measured points.
* `probe`: one factor and an interval from small programs that were both simulated and run.
* `transfer_calibration`: figures of a calibrated device for one that was never measured.
"""
