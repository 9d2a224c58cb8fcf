# What can be known about a cluster before a cloud is asked: every rule here fails the plan, in words a person can act on.
module "catalog" {
  source = "../catalog"
}

locals {
  shapes = module.catalog.shapes
  roles  = ["prefill", "decode", "router", "ingress", "native", "observability"]

  # The hosts that take part in a handoff.
  handoff_roles = ["prefill", "decode"]

  hosts = merge([
    for pool, member in var.members : {
      for i in range(member.count) : "${var.name}-${pool}-${i + 1}" => {
        pool  = pool
        index = i
        role  = member.role
        also  = member.also
        shape = member.shape
        gpus  = local.shapes[member.shape].gpus
      }
    }
  ]...)

  # A site's own figure goes before the list price.
  prices       = merge(module.catalog.prices, var.prices)
  prices_known = { for pool, member in var.members : pool => try(local.prices[member.shape].usd_per_hour * member.count, null) }
}

# Offers move faster than a catalogue: a zone it does not know is a warning, not an error.
check "shape_is_offered_in_zone" {
  assert {
    condition = alltrue([
      for member in var.members : length(local.shapes[member.shape].zones) == 0 || anytrue([for zone in local.shapes[member.shape].zones : startswith(var.zone, zone)])
    ])
    error_message = format("zone = %s: the catalogue does not know it for %s. Confirm with the provider that the shape is offered there.", jsonencode(var.zone), join(", ", distinct([
      for member in var.members : member.shape if !(length(local.shapes[member.shape].zones) == 0 || anytrue([for zone in local.shapes[member.shape].zones : startswith(var.zone, zone)]))
    ])))
  }
}

# A reservation that ends within a day is in order only for someone who knows it: a warning.
check "reservation_lasts_a_day" {
  assert {
    condition = alltrue([for reservation in var.reservations : reservation.ends_at == null ? true : try(timecmp(reservation.ends_at, timeadd(plantimestamp(), "24h")) > 0, true)])
    error_message = format("reservations: %s: less than a day is left, and the hosts go with it. Extend it, or drain the cluster before.", join(", ", [
      for key, reservation in var.reservations : "${key}.ends_at = ${jsonencode(reservation.ends_at)}" if reservation.ends_at == null ? false : !try(timecmp(reservation.ends_at, timeadd(plantimestamp(), "24h")) > 0, true)
    ]))
  }
}
